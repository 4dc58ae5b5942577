"""OpenRLHF's trainer on simulated Ray nodes, the first of which is the head.

simulated.py DIR LAYOUT GPUS STEPS HEADS [ARGUMENT...]: GPUs is the number for each node, such as 0,8,8. HEADS
is the number of attention heads of the model, a multiple of the engines' tensor parallelism (0: the default).
The arguments are appended to those of the layout. Layout "apart" is "separate" with separate GPUs for each
role. Layout "published" has no arguments: those of a published script, in which {folder} is DIR.
"""

import subprocess
import sys
import time
from pathlib import Path

import ray
import scripts_of_openrlhf
from processes import END_SECONDS
from ray._private.state import actors
from ray.cluster_utils import Cluster
from rlhf_stack.demo import tiny_model, tiny_run

MEGABYTE = 1 << 20
APART, PUBLISHED = "apart", "published"
# A separate process, as a user's driver is: Ray's reply threads belong to the process and not to the
# connection. They ended a process that had reconnected by SIGSEGV (ray-project/ray#61863, for the GCS).
DRIVER = Path(__file__).with_name("driver.py")
HEAD = 32  # elements: the smallest head size of vLLM's attention on a CPU


def main() -> None:
    """Run the trainer; its error ends this process."""
    directory, layout, gpus, steps, heads, *changes = sys.argv[1:]
    if layout == PUBLISHED:
        scripts_of_openrlhf.make_files(Path(directory))
    else:
        tiny_model.make(Path(directory), seed=0, steps=int(steps))
    if int(heads):
        tiny_model.HIDDEN = HEAD * int(heads)
        tiny_model.make_model(Path(directory, "model"), seed=0, layers=2, heads=int(heads))
    cluster = Cluster()
    try:
        for index, count in enumerate(map(int, gpus.split(","))):
            # The head keeps the driver's own address, so that the driver finds it.
            address = {"node_ip_address": f"127.0.1.{index + 1}"} if index else {}
            cluster.add_node(
                num_cpus=max(4, 2 * count),
                num_gpus=count,
                object_store_memory=100 * MEGABYTE,
                include_dashboard=False,
                **address,
            )
        arguments = arguments_of(layout, Path(directory), int(steps))
        changes = [change.replace(scripts_of_openrlhf.FOLDER, directory) for change in changes]
        command = [sys.executable, str(DRIVER), cluster.address, *arguments, *changes]
        if code := subprocess.call(command):
            sys.exit(f"the trainer ended with exit code {code}")
        ray.init(address=cluster.address, log_to_driver=False)
        expect_nothing_left()
    finally:
        ray.shutdown()
        cluster.shutdown()


def arguments_of(layout: str, directory: Path, steps: int) -> list[str]:
    """Return the arguments of a layout for the files in ``directory``."""
    if layout == PUBLISHED:
        return []
    arguments = tiny_run.train_arguments("separate" if layout == APART else layout, directory, steps, seed=0)
    if layout == APART:
        return [argument for argument in arguments if not argument.startswith("--colocate")]
    return arguments


def expect_nothing_left() -> None:
    """Exit with an error that names actors and placement groups that outlive the driver of their run."""
    end = time.monotonic() + END_SECONDS
    while alive := live_resources():
        if time.monotonic() > end:
            sys.exit(f"the run has ended but left in the cluster: {', '.join(alive)}")
        time.sleep(0.1)


def live_resources() -> list[str]:
    """Return the class names of live actors and the ids of placement groups that are not removed."""
    groups = ray.util.placement_group_table().values()
    return [
        *(actor["ActorClassName"] for actor in actors().values() if actor["State"] != "DEAD"),
        *(group["placement_group_id"] for group in groups if group["state"] != "REMOVED"),
    ]


if __name__ == "__main__":
    main()
