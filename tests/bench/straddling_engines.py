"""Tokens a second of two engines on the cluster of this container, placed by upstream or by us.

straddling_engines.py {upstream,ours} MODEL: one engine after the other answers the same prompts; prints JSON,
an object an engine: the nodes of its workers, tokens, seconds.
"""

import json
import sys
import time

import ray
from openrlhf.trainer.ray import vllm_engine
from openrlhf.trainer.ray.utils import get_bundle_indices
from rlhf_stack import placement, starting
from vllm import SamplingParams

ENGINES, TENSOR_PARALLEL = 2, 2
REQUESTS, TOKENS = 16, 64
DEADLINE = 600


def main() -> None:
    """Start the engines, ask them, say how fast they were."""
    placed_by, model = sys.argv[1:]
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
    starting.wait(engines)
    print(json.dumps([ask(engine) for engine in engines]))


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
