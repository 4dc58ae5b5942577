"""Cost of a trainer rank that waits in a collective on the GPU of an engine that generates.

``PYTHONPATH=images/runtime python -m tests.bench.gpu_contention [--plot FILE.png] [--json]``; 2 minutes.

One container of the default cell, two engines and two ranks; a CPU core takes the place of a GPU that an
engine and a rank share. A kernel of NCCL busy-waits, and so does the rank here: gloo's own wait uses no
core. The first rounds precede all training; then a rank waits while the engines generate (as in OpenRLHF
before 0.6.3); then no rank waits, as in 0.11.2, where RLHF_STACK_CHECK_COTENANCY=1 makes such a wait an
error.
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rlhf_stack.certify import engines
from rlhf_stack.certify.engines import AFTER, BEFORE, WAITING

from scripts.docker.client import connect, with_docker_errors
from scripts.errors import run
from scripts.matrix.load import find, load
from scripts.testing.cluster import Cluster, ContainerNode
from scripts.testing.demo import DATA
from scripts.testing.in_image import local_image
from tests.bench.results import Row, parser, show

SCRIPT = Path(__file__).with_name("gpu_contention_engines.py")
INSIDE = "/opt/bench.py"
LAYERS = 8
TOKENS = engines.REQUESTS * engines.TOKENS  # per engine and round


def seconds(rounds: Sequence[dict[str, Any]], phase: str, index: int) -> float:
    """Return the median seconds of an engine's rounds in a phase."""
    return float(statistics.median(one["seconds"][index] for one in rounds if one["phase"] == phase))


def plot(file: Path, rounds: Sequence[dict[str, Any]]) -> None:
    """Plot each engine's tokens per second over time, with the rounds in which a rank waits shaded."""
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    times = [one["start"] for one in rounds]
    for index in range(len(rounds[0]["seconds"])):
        axes.plot(times, [TOKENS / one["seconds"][index] for one in rounds], "o-", label=f"engine {index}")
    trained = [one["start"] for one in rounds if one["phase"] != BEFORE]
    waiting = [one["start"] for one in rounds if one["phase"] == WAITING]
    after = min(one["start"] for one in rounds if one["phase"] == AFTER)
    axes.axvline(trained[0], color="black", linewidth=1, linestyle=":", label="first training step")
    axes.axvspan(waiting[0], after, color="tab:red", alpha=0.15, label="a rank waits next to engine 0")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds")
    axes.set_ylabel("tokens/s")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(file, dpi=120)


def main() -> int:
    """Run the command line."""
    options = parser("gpu_contention", __doc__)
    options.add_argument("--plot", type=Path, help="also draw a plot, as PNG")
    arguments = options.parse_args()
    matrix, client = load(), connect()
    cell = find(matrix, arguments.cell or matrix.default)
    mounts = {"volumes": {str(SCRIPT): {"bind": INSIDE, "mode": "ro"}}}
    nodes = (ContainerNode("one", gpus=2),)
    with Cluster(client, local_image(client, cell), nodes, options=mounts) as cluster:
        make = ["python", "-m", "rlhf_stack.demo.tiny_model", "--out", DATA, "--layers", str(LAYERS)]
        cluster.output(cluster.head, make)
        output = cluster.output(cluster.head, ["python", INSIDE, f"{DATA}/model"])
    rounds: list[dict[str, Any]] = json.loads(output.splitlines()[-1])
    if arguments.plot:
        plot(arguments.plot, rounds)
    rows = [
        Row(
            f"{TOKENS} tokens of engine {index}",
            "s",
            seconds(rounds, AFTER, index),
            seconds(rounds, WAITING, index),
        )
        for index in range(len(rounds[0]["seconds"]))
    ]
    before = ", ".join(f"{seconds(rounds, BEFORE, index):.3g} s" for index in range(len(rows)))
    show(rows, [f"{BEFORE}: {before}", "a rank waits next to engine 0 only"], arguments.json, WAITING)
    return 0


if __name__ == "__main__":
    run(with_docker_errors(main))
