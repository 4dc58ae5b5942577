"""Measures two engines' rounds of generation, with and without a trainer rank that waits on one's GPU.

gpu_contention_engines.py MODEL: prints the rounds of `rlhf_stack.certify.engines` as JSON.
"""

import json
import sys

import ray
from rlhf_stack.certify import engines

ENGINES = 2


def main() -> None:
    """Start engines and ranks, generate in rounds, print their times."""
    ray.init(address="auto", log_to_driver=False)
    started = engines.create(sys.argv[1], ENGINES)
    addresses = [ray.util.get_node_ip_address()] * ENGINES
    print(json.dumps(engines.rounds(started, addresses, engines.ROUNDS)))


if __name__ == "__main__":
    main()
