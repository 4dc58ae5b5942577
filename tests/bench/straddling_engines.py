"""How fast one of two engines answers on the cluster of this container, placed by upstream or by us.

straddling_engines.py {upstream,ours} INDEX MODEL: both engines start, then all but the one of this index end,
because an engine that waits for requests waits busily. Prints JSON: its workers' nodes, tokens, seconds.
"""

import json
import sys
import time

import ray
from openrlhf.trainer.ray import vllm_engine
from openrlhf.trainer.ray.utils import get_bundle_indices
from ray.util.state import list_actors
from rlhf_stack import placement
from rlhf_stack.engine import startup
from vllm import SamplingParams

ENGINES, TENSOR_PARALLEL = 2, 2
REQUESTS, TOKENS = 16, 64
DEADLINE = 600


def main() -> None:
    """Start the engines, ask them, say how fast they were."""
    placed_by, index, model = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    ray.init(address="auto", log_to_driver=False)
    own = None
    if placed_by == "upstream":  # its own group, and its own cut into engines
        bundles = [{"GPU": 1, "CPU": 1}] * (ENGINES * TENSOR_PARALLEL)
        own = ray.util.placement_group(bundles, strategy="PACK")
        ray.get(own.ready(), timeout=60)
        placement.engine_bundles = get_bundle_indices
    engines = vllm_engine.create_vllm_engines(
        num_engines=ENGINES,
        tensor_parallel_size=TENSOR_PARALLEL,
        pretrain=model,
        seed=0,
        full_determinism=False,
        enable_prefix_caching=False,
        enforce_eager=True,
        max_model_len=256,
        gpu_memory_utilization=0.5,
        own_pg=own,
    )
    startup.wait_for_engine_startup(engines)
    for other in engines[:index] + engines[index + 1 :]:
        end(other)
    print(json.dumps(ask(engines[index])))


def end(engine: ray.actor.ActorHandle) -> None:
    """Kill an engine; returns when its workers, which are actors too, have gone with it."""
    workers = {(one["node_id"], one["pid"]) for one in ray.get(engine.where.remote(), timeout=DEADLINE)}
    ray.kill(engine)
    until = time.monotonic() + DEADLINE
    while left := workers & alive():
        if time.monotonic() > until:
            sys.exit(f"{len(left)} workers are alive {DEADLINE} s after their engine was killed")
        time.sleep(0.1)


def alive() -> set[tuple[str, int]]:
    """Node and process of each actor of this cluster that lives."""
    return {(one.node_id, one.pid) for one in list_actors(filters=[("state", "=", "ALIVE")])}


def ask(engine: ray.actor.ActorHandle) -> dict[str, object]:
    """What one engine does with all requests at once, after two to warm up."""
    ray.get([generate(engine, number) for number in range(2)], timeout=DEADLINE)
    start = time.monotonic()
    answers = ray.get([generate(engine, number) for number in range(REQUESTS)], timeout=DEADLINE)
    seconds = time.monotonic() - start
    where = ray.get(engine.where.remote(), timeout=DEADLINE)
    return {
        "nodes": [worker["host"] for worker in where],
        "tokens": sum(len(answer.outputs[0].token_ids) for answer in answers),
        "seconds": seconds,
    }


def generate(engine: ray.actor.ActorHandle, number: int) -> ray.ObjectRef:
    """One request, of a prompt of its own."""
    asked = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0)
    return engine.generate.remote([3 + number + position for position in range(16)], asked)


if __name__ == "__main__":
    main()
