"""Measures one of two engines on the cluster of this container, placed by upstream or by us.

straddling_engines.py {upstream,ours} INDEX MODEL: starts both engines, then ends all but the one at INDEX,
because an idle engine busy-waits for requests. Prints JSON: its workers' nodes, tokens, seconds.
"""

import json
import sys
import time

import ray
from openrlhf.trainer.ray.utils import get_bundle_indices
from ray.util.state import list_actors
from rlhf_stack.certify.engines import DEADLINE, create, request
from rlhf_stack.hooks import openrlhf_v0_11 as hooks

ENGINES, TENSOR_PARALLEL = 2, 2
REQUESTS = 16


def main() -> None:
    """Start the engines, measure one, print the result."""
    placed_by, index, model = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    ray.init(address="auto", log_to_driver=False)
    if placed_by == "upstream":  # upstream's own placement group and division into engines
        bundles = [{"GPU": 1, "CPU": 1}] * (ENGINES * TENSOR_PARALLEL)
        own = ray.util.placement_group(bundles, strategy="PACK")
        ray.get(own.ready(), timeout=60)
        # The patched create_vllm_engines calls both.
        hooks.claim_engine_groups = lambda *_: own
        hooks.engine_place = lambda group, *engine: (group, get_bundle_indices(group, *engine))
    engines = create(model, ENGINES, size=TENSOR_PARALLEL, cpu_memory=0.5)
    for other in engines[:index] + engines[index + 1 :]:
        end(other)
    print(json.dumps(measure(engines[index])))


def end(engine: ray.actor.ActorHandle) -> None:
    """Kill an engine, and wait until its workers, which are actors too, have ended."""
    workers = {(one["node_id"], one["pid"]) for one in ray.get(engine.where.remote(), timeout=DEADLINE)}
    ray.kill(engine)
    until = time.monotonic() + DEADLINE
    while remaining := workers & alive():
        if time.monotonic() > until:
            sys.exit(f"{len(remaining)} workers are alive {DEADLINE:g} s after their engine was killed")
        time.sleep(0.1)


def alive() -> set[tuple[str, int]]:
    """Return node and process id of each live actor of this cluster."""
    return {(one.node_id, one.pid) for one in list_actors(filters=[("state", "=", "ALIVE")])}


def measure(engine: ray.actor.ActorHandle) -> dict[str, object]:
    """Send all requests to one engine at once, after two for warm-up; return its result."""
    ray.get([request(engine, number) for number in range(2)], timeout=DEADLINE)
    start = time.monotonic()
    answers = ray.get([request(engine, number) for number in range(REQUESTS)], timeout=DEADLINE)
    seconds = time.monotonic() - start
    where = ray.get(engine.where.remote(), timeout=DEADLINE)
    return {
        "nodes": [worker["host"] for worker in where],
        "tokens": sum(len(answer.outputs[0].token_ids) for answer in answers),
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
