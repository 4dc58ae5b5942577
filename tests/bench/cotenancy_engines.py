"""How long two engines generate, round by round, while a rank of a trainer waits on the GPU of one, or not.

cotenancy_engines.py MODEL: prints JSON, an object a round: its phase, when it began, and the seconds of each
engine.
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
BEFORE, WAITING, AFTER = "before the first training step", "a rank waits", "nobody waits"
DEADLINE = 600


def pin(_: object, core: int) -> None:
    """Give this process and its children one core, which stands for a GPU."""
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {core})


class Rank:
    """A rank of a trainer, on the core of the engine of the same number."""

    def __init__(self, rank: int, port: int, core: int) -> None:
        pin(self, core)
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ENGINES)

    def reduce(self, elements: int) -> None:
        """A collective of training, which ends when every rank is in it."""
        dist.all_reduce(torch.ones(elements))

    def wait(self) -> None:
        """The same, awaited as a kernel of NCCL does on its GPU: busily."""
        work = dist.all_reduce(torch.ones(1), async_op=True)
        while not work.is_completed():
            pass


def main() -> None:
    """Start engines and ranks, generate in rounds, say how fast it was."""
    cores = sorted(os.sched_getaffinity(0))[:ENGINES]
    if len(cores) < ENGINES:
        sys.exit(f"a core for each of {ENGINES} engines is needed, and there are {len(cores)}")
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
    generate(engines)  # what is done once is not measured
    print(json.dumps(rounds(engines, ranks)))


def rounds(
    engines: list[ray.actor.ActorHandle], ranks: list[ray.actor.ActorHandle]
) -> list[dict[str, object]]:
    """What each round was; a training step is between any two, but for those before the first one."""
    begin, found = time.monotonic(), []
    for phase in (BEFORE, WAITING, AFTER):
        for _ in range(ROUNDS):
            if phase != BEFORE:
                ray.get([rank.reduce.remote(1 << 20) for rank in ranks], timeout=DEADLINE)
            start = time.monotonic()
            waiting = [ranks[0].wait.remote()] if phase == WAITING else []
            seconds = generate(engines)
            if waiting:
                ray.get([*waiting, ranks[1].reduce.remote(1)], timeout=DEADLINE)
            found.append({"phase": phase, "start": start - begin, "seconds": seconds})
    return found


def generate(engines: list[ray.actor.ActorHandle]) -> list[float]:
    """The seconds until each engine had answered its requests; all begin together."""
    asked = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0)
    start = time.monotonic()
    left = {
        engine.generate.remote([3 + number + place for place in range(16)], asked): index
        for index, engine in enumerate(engines)
        for number in range(REQUESTS)
    }
    seconds = [0.0] * len(engines)
    while left:
        (done,), _ = ray.wait(list(left), timeout=DEADLINE)
        seconds[left.pop(done)] = time.monotonic() - start
    return seconds


if __name__ == "__main__":
    main()
