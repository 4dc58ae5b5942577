"""The rungs ``sleep`` and ``throughput``: engines of OpenRLHF with the demo's model."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from statistics import median
from typing import Any

from rlhf_stack.accelerator import devices
from rlhf_stack.certify.ladder import Found, NotClimbedError, Place
from rlhf_stack.certify.model import Measurement
from rlhf_stack.certify.on_cluster import (
    actors,
    free_endpoint,
    gpus_of,
    join_group,
    make_files,
    nodes_with_gpus,
)
from rlhf_stack.lazy import ray, torch

DEADLINE = 600.0
REQUESTS, TOKENS, ROUNDS, LAYERS = 8, 64, 6, 8
SMALL_ROUNDS = 2
BEFORE, WAITING, AFTER = "before the first training step", "a rank waits", "no rank waits"
PHASES = (BEFORE, WAITING, AFTER)
CORES = 2  # of a CPU, on which an engine computes next to a rank
GIGABYTE = 1e9


def sleep(place: Place) -> Found:
    """Compare what an engine generates before and after its sleep; measure the memory that it frees."""
    if version("openrlhf").startswith("0.5"):
        raise NotClimbedError("vLLM 0.4 has no sleep mode")
    with _engines(place, 1, asleep=True) as (engines, _):
        (engine,) = engines
        awake = [_call(engine.wake_up), _generated(engine), _call(engine.__ray_call__, free_memory)]
        asleep = [_call(engine.sleep), _call(engine.__ray_call__, free_memory)]
        again = [_call(engine.wake_up), _generated(engine)]
    freed = (asleep[1] - awake[2]) / GIGABYTE
    problems = [] if awake[1] == again[1] else ["other tokens after it woke up"]
    if devices.is_gpu() and freed <= 0:
        problems.append("no GPU memory was freed")
    measured = [Measurement("GPU memory that sleep frees", freed, "GB")] if devices.is_gpu() else []
    return Found(measured, {"tokens": awake[1], "again": again[1]}, "; ".join(problems))


def free_memory(_: object) -> int:
    """Free bytes of this process's GPU; 0 on a CPU, where sleep frees nothing."""
    if not devices.is_gpu():
        return 0
    return int(torch.cuda.mem_get_info()[0])


def throughput(place: Place) -> Found:
    """Measure each engine; of several also while a trainer rank on the first one's GPU waits in a collective.

    The rank waits for one on another GPU: NCCL refuses two on the same one, and over gloo none would use it.
    """
    if version("openrlhf").startswith("0.5"):
        raise NotClimbedError("the engine of OpenRLHF 0.5 generates in batches alone")
    number = SMALL_ROUNDS if place.small else ROUNDS
    most = CORES if not devices.is_gpu() else None
    with _engines(place, most) as (engines, addresses):
        found = rounds(engines, addresses, number)
    rates = {
        phase: [
            REQUESTS * TOKENS / median(one["seconds"][index] for one in found if one["phase"] == phase)
            for index in range(len(engines))
        ]
        for phase in dict.fromkeys(one["phase"] for one in found)
    }
    measured = [
        Measurement(f"engine {index}, {phase}", rate, "tokens/s")
        for phase, values in rates.items()
        for index, rate in enumerate(values)
    ]
    measured.append(Measurement("ranks that waited", 1 if WAITING in rates else 0))
    return Found(measured, {"rounds": found, "nodes": addresses})


@contextmanager
def _engines(place: Place, most: int | None, asleep: bool = False) -> Iterator[tuple[list[Any], list[str]]]:
    """Yield engines of one GPU each, at most ``most``, with the addresses of their nodes."""
    with nodes_with_gpus(place) as nodes:
        folder = make_files(place, nodes, 1, LAYERS)
        count = len(gpus_of(nodes)[:most])
        engines = create(str(folder / "model"), count, asleep)
        try:
            where = ray.get([engine.where.remote() for engine in engines], timeout=DEADLINE)
            yield engines, [str(ranks[0]["node"]) for ranks in where]
        finally:
            for engine in engines:
                ray.kill(engine)


def create(model: str, count: int, asleep: bool = False, size: int = 1, cpu_memory: float = 0.1) -> list[Any]:
    """Start ``count`` engines of ``size`` GPUs and wait for them."""
    from openrlhf.trainer.ray import vllm_engine

    from rlhf_stack.engine import startup

    engines = vllm_engine.create_vllm_engines(
        num_engines=count,
        tensor_parallel_size=size,
        pretrain=model,
        seed=0,
        full_determinism=False,
        enable_prefix_caching=False,
        enforce_eager=True,
        max_model_len=256,
        gpu_memory_utilization=0.3 if devices.is_gpu() else cpu_memory,
        vllm_enable_sleep=asleep,
    )
    startup.wait_for_engine_startup(engines)
    return list(engines)


class Rank:
    """A trainer rank on the GPU of an engine; on a CPU, on the core of the engine with the same index."""

    def share(self, gpu: str, core: int | None) -> None:
        """Use the GPU ``gpu`` of this node, or a core."""
        if core is not None:
            pin(self, core)
        else:
            devices.select_gpu(gpu)

    def join(self, where: tuple[str, int], rank: int, world: int) -> None:
        """Join the group of all ranks."""
        join_group(where, rank, world)
        self.reduce(1)

    def reduce(self, elements: int) -> None:
        """Run a collective of training, which ends when every rank has joined it."""
        import torch.distributed as dist

        dist.all_reduce(torch.ones(elements, device=devices.torch_device()))
        devices.synchronize()

    def wait_busily(self) -> None:
        """Join the collective and busy-wait for it: a kernel of NCCL does on its GPU, gloo does not."""
        import torch.distributed as dist

        work = dist.all_reduce(torch.ones(1, device=devices.torch_device()), async_op=True)
        while not work.is_completed():
            pass


def rounds(engines: Sequence[Any], addresses: Sequence[str], number: int) -> list[dict[str, Any]]:
    """Phase, start and seconds of each engine, for ``number`` rounds of generation in each phase.

    With two engines or more, a rank next to each takes a training step before each round of the later
    phases; in `WAITING` the first one waits in a collective while the engines generate.
    """
    begin, found = time.monotonic(), []
    cores = [None] * len(engines) if devices.is_gpu() else sorted(os.sched_getaffinity(0))[: len(engines)]
    if len(cores) < len(engines):
        raise NotClimbedError(f"{len(engines)} engines need a core each, and {len(cores)} are available")
    if not devices.is_gpu():
        for engine, core in zip(engines, cores, strict=True):
            _call(engine.__ray_call__, pin, core)
    with actors(Rank, addresses, gpus=0) as ranks:
        if len(engines) > 1:
            where = ray.get([engine.where.remote() for engine in engines], timeout=DEADLINE)
            gpus = [str(each[0]["gpu"]) for each in where]
            _all([rank.share.remote(gpu, core) for rank, gpu, core in zip(ranks, gpus, cores, strict=True)])
            port = _call(ranks[0].__ray_call__, free_endpoint)
            _all([rank.join.remote(port, index, len(ranks)) for index, rank in enumerate(ranks)])
        generate(engines)  # warm-up, not measured
        for phase in PHASES if len(engines) > 1 else (BEFORE,):
            for _ in range(number):
                if phase != BEFORE:
                    _all([rank.reduce.remote(1 << 20) for rank in ranks])
                start = time.monotonic()
                waiting = [ranks[0].wait_busily.remote()] if phase == WAITING else []
                seconds = generate(engines)
                if waiting:
                    _all([*waiting, *(rank.reduce.remote(1) for rank in ranks[1:])])
                found.append({"phase": phase, "start": start - begin, "seconds": seconds})
    return found


def pin(_: object, core: int) -> None:
    """Pin this process and its children to one core, which takes the place of a GPU."""
    import psutil

    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {core})


def generate(engines: Sequence[Any]) -> list[float]:
    """The seconds until each engine has answered its requests; all start together."""
    start = time.monotonic()
    pending = {
        request(engine, number): index for index, engine in enumerate(engines) for number in range(REQUESTS)
    }
    seconds = [0.0] * len(engines)
    while pending:
        done, _ = ray.wait(list(pending), timeout=DEADLINE)
        if not done:
            raise TimeoutError(f"engines {sorted(set(pending.values()))} did not answer in {DEADLINE:g} s")
        ray.get(done[0])
        seconds[pending.pop(done[0])] = time.monotonic() - start
    return seconds


def request(engine: Any, number: int) -> Any:
    """Send an engine request ``number``, which has its own prompt; return the reference to its answer."""
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0)
    return engine.generate.remote([3 + number + place for place in range(16)], parameters)


def _generated(engine: Any) -> list[int]:
    return list(ray.get(request(engine, 0), timeout=DEADLINE).outputs[0].token_ids)


def _call(method: Any, *arguments: Any) -> Any:
    """The result of an actor's method, with a deadline."""
    return ray.get(method.remote(*arguments), timeout=DEADLINE)


def _all(calls: Sequence[Any]) -> None:
    ray.get(list(calls), timeout=DEADLINE)
