"""Measures two engines' rounds of generation, with and without a trainer rank that waits on one's GPU.

gpu_contention_engines.py MODEL: prints JSON, one object per round: its phase, its start, and the seconds of
each engine.
"""

import json
import os
import socket
import sys
import time

import psutil
import ray
import torch
import torch.distributed as dist
from openrlhf.trainer.ray import vllm_engine
from rlhf_stack.engine import startup
from vllm import SamplingParams

ENGINES = 2
REQUESTS, TOKENS = 8, 64
ROUNDS = 6
BEFORE, WAITING, AFTER = "before the first training step", "a rank waits", "no rank waits"
DEADLINE = 600


def pin(_: object, core: int) -> None:
    """Pin this process and its children to one core, which takes the place of a GPU."""
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {core})


class Rank:
    """A trainer rank, on the core of the engine with the same index."""

    def __init__(self, rank: int, port: int, core: int) -> None:
        pin(self, core)
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ENGINES)

    def reduce(self, elements: int) -> None:
        """Run a collective of training, which ends when every rank has joined it."""
        dist.all_reduce(torch.ones(elements))

    def wait_busily(self) -> None:
        """Join the collective and busy-wait for it, as a kernel of NCCL does on its GPU."""
        work = dist.all_reduce(torch.ones(1), async_op=True)
        while not work.is_completed():
            pass


def main() -> None:
    """Start engines and ranks, generate in rounds, print their times."""
    cores = sorted(os.sched_getaffinity(0))[:ENGINES]
    if len(cores) < ENGINES:
        sys.exit(f"{ENGINES} engines need a core each, and {len(cores)} are available")
    ray.init(address="auto", log_to_driver=False)
    engines = vllm_engine.create_vllm_engines(
        num_engines=ENGINES,
        tensor_parallel_size=1,
        pretrain=sys.argv[1],
        seed=0,
        full_determinism=False,
        enable_prefix_caching=False,
        enforce_eager=True,
        max_model_len=256,
        gpu_memory_utilization=0.1,
    )
    startup.wait_for_engine_startup(engines)
    pinned = [engine.__ray_call__.remote(pin, core) for engine, core in zip(engines, cores, strict=True)]
    ray.get(pinned, timeout=DEADLINE)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ranks = [ray.remote(num_cpus=0)(Rank).remote(index, port, core) for index, core in enumerate(cores)]
    generate(engines)  # warm-up, not measured
    print(json.dumps(rounds(engines, ranks)))


def rounds(
    engines: list[ray.actor.ActorHandle], ranks: list[ray.actor.ActorHandle]
) -> list[dict[str, object]]:
    """Run all rounds, with a training step before each except those of the first phase."""
    begin, found = time.monotonic(), []
    for phase in (BEFORE, WAITING, AFTER):
        for _ in range(ROUNDS):
            if phase != BEFORE:
                ray.get([rank.reduce.remote(1 << 20) for rank in ranks], timeout=DEADLINE)
            start = time.monotonic()
            waiting = [ranks[0].wait_busily.remote()] if phase == WAITING else []
            seconds = generate(engines)
            if waiting:
                ray.get([*waiting, ranks[1].reduce.remote(1)], timeout=DEADLINE)
            found.append({"phase": phase, "start": start - begin, "seconds": seconds})
    return found


def generate(engines: list[ray.actor.ActorHandle]) -> list[float]:
    """Return the seconds until each engine has answered its requests; all start together."""
    parameters = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0)
    start = time.monotonic()
    pending = {
        engine.generate.remote([3 + number + place for place in range(16)], parameters): index
        for index, engine in enumerate(engines)
        for number in range(REQUESTS)
    }
    seconds = [0.0] * len(engines)
    while pending:
        (done,), _ = ray.wait(list(pending), timeout=DEADLINE)
        seconds[pending.pop(done)] = time.monotonic() - start
    return seconds


if __name__ == "__main__":
    main()
