"""OpenRLHF's own trainer on simulated Ray nodes, the first of which is the head.

simulated.py DIR LAYOUT GPUS STEPS HEADS [ARGUMENT...]: the GPUs of each node, as in 0,8,8; the attention
heads of the model, which are a multiple of the engines' tensor parallelism (0: as many as it usually has);
the arguments come after those of the layout. Layout "apart" is "separate" with GPUs for each role alone.
"""

import subprocess
import sys
import time
from pathlib import Path

import ray
from processes import END_SECONDS
from ray.cluster_utils import Cluster
from rlhf_stack.demo import tiny_model, tiny_run

MEGABYTE = 1 << 20
APART = "apart"
# A process of its own, as a user's is: the threads that send Ray's replies are of the process, not of the
# connection, and ended one that had connected again by SIGSEGV (ray-project/ray#61863: the same of the GCS).
DRIVER = Path(__file__).with_name("driver.py")
HEAD = 32  # elements: vLLM's attention on a CPU knows no smaller one


def main() -> None:
    """Train; an error of the trainer is this process's error."""
    directory, layout, gpus, steps, heads, *changes = sys.argv[1:]
    tiny_model.make(Path(directory), seed=0, steps=int(steps))
    if int(heads):
        tiny_model.HIDDEN = HEAD * int(heads)
        tiny_model.make_model(Path(directory, "model"), seed=0, layers=2, heads=int(heads))
    cluster = Cluster()
    try:
        for index, count in enumerate(map(int, gpus.split(","))):
            # The driver has to find the head as its own.
            address = {"node_ip_address": f"127.0.1.{index + 1}"} if index else {}
            cluster.add_node(
                num_cpus=max(4, 2 * count),
                num_gpus=count,
                object_store_memory=100 * MEGABYTE,
                include_dashboard=False,
                **address,
            )
        base = "separate" if layout == APART else layout
        arguments = tiny_run.train_arguments(base, Path(directory), int(steps), seed=0)
        if layout == APART:
            arguments = [argument for argument in arguments if not argument.startswith("--colocate")]
        command = [sys.executable, str(DRIVER), cluster.address, *arguments, *changes]
        if code := subprocess.call(command):
            sys.exit(f"the trainer ended with exit code {code}")
        ray.init(address=cluster.address, log_to_driver=False)
        expect_nothing_left()
    finally:
        ray.shutdown()
        cluster.shutdown()


def expect_nothing_left() -> None:
    """SystemExit names the actors and placement groups of a run that stay after its driver has gone."""
    end = time.monotonic() + END_SECONDS
    while left := living():
        if time.monotonic() > end:
            sys.exit(f"the run is over and left in the cluster: {', '.join(left)}")
        time.sleep(0.1)


def living() -> list[str]:
    """The actors that are not dead, by class, and the placement groups that are not removed, by id."""
    actors = ray._private.state.actors().values()
    groups = ray.util.placement_group_table().values()
    return [
        *(actor["ActorClassName"] for actor in actors if actor["State"] != "DEAD"),
        *(group["placement_group_id"] for group in groups if group["state"] != "REMOVED"),
    ]


if __name__ == "__main__":
    main()
