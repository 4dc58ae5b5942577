"""Seconds of a sync of trainer ranks and engines that share their GPUs: in buckets, against one by one.

``python -m tests.bench.colocated [--cell CELL] [--gpus 2] [--json]`` on the built image. CPUs take the place
of GPUs, and shared memory that of CUDA IPC. Both ways are measured alternately, in the same processes.
"""

from scripts.docker.client import connect, with_docker_errors
from scripts.errors import run
from scripts.matrix.load import find, load
from scripts.testing.cluster import remove_on_exit
from scripts.testing.in_image import local_image
from tests.bench.results import Row, parser, show
from tests.bench.sync import answer, started

INSIDE = "/opt/bench/colocated_ranks.py"


def main() -> int:
    """Run the command line."""
    options = parser("colocated", __doc__)
    options.add_argument("--gpus", type=int, default=2)
    options.add_argument("--repeat", type=int, default=3)
    arguments = options.parse_args()
    client, matrix = connect(), load()
    image = local_image(client, find(matrix, arguments.cell or matrix.default))
    sizes = ["--gpus", str(arguments.gpus), "--repeat", str(arguments.repeat)]
    container = started(client, image, sizes, INSIDE)
    with remove_on_exit([container]):
        found = answer(container)
    table = [
        Row(
            f"{model}: {each['parameters']} tensors, {each['bytes'] / 1e6:.0f} MB for {arguments.gpus} GPUs",
            "s",
            each["ours"],
            each["one_by_one"],
        )
        for model, each in found.items()
    ]
    note = (
        "one by one: per parameter a copy, its handle gathered from all ranks, a call to each engine, and a "
        "barrier, as upstream; without vLLM's loader, which both ways then run"
    )
    show(table, [note], arguments.json, "one by one")
    return 0


if __name__ == "__main__":
    run(with_docker_errors(main))
