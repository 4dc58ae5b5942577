"""OpenRLHF's own trainer on two simulated Ray nodes.

two_nodes.py DIR LAYOUT GPUS_PER_NODE STEPS [ARGUMENT...]: the arguments come after those of the layout.
"""

import runpy
import sys
from pathlib import Path

import ray
from ray.cluster_utils import Cluster
from rlhf_stack import tiny, tiny_run

MEGABYTE = 1 << 20


def main() -> None:
    """Train; an error of the trainer is this process's error."""
    directory, layout, gpus, steps, *changes = sys.argv[1:]
    tiny.make(Path(directory), seed=0, steps=int(steps))
    cluster = Cluster()
    try:
        for address in ({}, {"node_ip_address": "127.0.1.2"}):  # the driver has to find the first as its own
            cluster.add_node(
                num_cpus=4,
                num_gpus=int(gpus),
                object_store_memory=100 * MEGABYTE,
                include_dashboard=False,
                **address,
            )
        ray.init(address=cluster.address)
        arguments = tiny_run.train_arguments(layout, Path(directory), int(steps), seed=0)
        sys.argv = ["train_ppo_ray", *arguments, *changes]
        runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
