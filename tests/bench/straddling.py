"""Cost of an engine that straddles nodes: tokens per second as placed by upstream and as placed by us.

``python -m tests.bench.straddling [--megabits 10] [--plot FILE.png] [--json]``; about 5 minutes, as root.

Two containers of the default cell with three fake GPUs each, two engines with tensor parallelism 2.
Upstream's placement group gives three bundles to one node and one to the other, so its second engine
straddles; ours does not. Each engine answers the same 16 requests for 64 tokens while no other runs; model,
nodes and link are the same for both placements. A container's sending rate is limited, to model a fabric that
is slow compared with GPUs: a core computes some 50 GFLOP/s and an H100 some 1000 TFLOP/s, so 10 Mbit/s are to
the core what 200 Gbit/s are to the H100.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from scripts.docker.client import connect, with_docker_errors
from scripts.errors import UserError, run
from scripts.matrix.load import find, load
from scripts.testing.cluster import Cluster, ContainerNode
from scripts.testing.demo import DATA
from scripts.testing.in_image import local_image
from tests.bench.results import Row, parser, show
from tests.network import links

NODES = (ContainerNode("one", gpus=3), ContainerNode("two", gpus=3))
SCRIPT = Path(__file__).with_name("straddling_engines.py")
INSIDE = "/opt/bench.py"
LAYERS = 8
ENGINES = 2
PLACED_BY = {"upstream": "placed by upstream", "ours": "placed by us"}


def measure(cluster: Cluster, placed_by: str) -> list[dict[str, Any]]:
    """Return each engine of one placement: ``nodes``, ``tokens``, ``seconds``."""
    engines = []
    for index in range(ENGINES):
        print(f"engines {PLACED_BY[placed_by]}, engine {index} ...", file=sys.stderr, flush=True)
        output = cluster.output(cluster.head, ["python", INSIDE, placed_by, str(index), f"{DATA}/model"])
        engines.append(json.loads(output.splitlines()[-1]))
    return engines


def rate(engine: dict[str, Any]) -> float:
    """Return tokens per second."""
    return float(engine["tokens"] / engine["seconds"])


def plot(file: Path, found: dict[str, list[dict[str, Any]]], megabits: int) -> None:
    """Plot bars of each engine's tokens per second, by placement."""
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    labels, rates, colours = [], [], []
    for placed_by, engines in found.items():
        for index, one in enumerate(engines):
            nodes = sorted(set(one["nodes"]))
            labels.append(
                f"{PLACED_BY[placed_by]}\nengine {index} on node{'s' * (len(nodes) > 1)} {', '.join(nodes)}"
            )
            rates.append(rate(one))
            colours.append("tab:red" if len(nodes) > 1 else "tab:green")
    bars = axes.barh(labels, rates, color=colours)
    axes.bar_label(bars, fmt="%.0f", padding=3)
    axes.invert_yaxis()
    axes.set_xlabel(f"tokens/s, TP 2, {megabits} Mbit/s between the nodes")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120)


def rows(upstream: Sequence[dict[str, Any]], ours: Sequence[dict[str, Any]]) -> list[Row]:
    """Return a row per engine."""
    return [
        Row(f"64 tokens for 16 requests, engine {index}", "s", mine["seconds"], theirs["seconds"])
        for index, (mine, theirs) in enumerate(zip(ours, upstream, strict=True))
    ]


def main() -> int:
    """Run the command line."""
    options = parser("straddling", __doc__)
    options.add_argument("--megabits", type=int, default=10, help="sending rate of a node in Mbit/s (10)")
    options.add_argument("--plot", type=Path, help="also draw a plot, as PNG")
    arguments = options.parse_args()
    if reason := links.obstacle():
        raise UserError(f"the link between two containers cannot be limited: {reason}")
    matrix, client = load(), connect()
    cell = find(matrix, arguments.cell or matrix.default)
    mounts = {"volumes": {str(SCRIPT): {"bind": INSIDE, "mode": "ro"}}}
    with Cluster(client, local_image(client, cell), NODES, options=mounts) as cluster:
        for container in cluster.containers:
            cluster.output(
                container,
                ["python", "-m", "rlhf_stack.demo.tiny_model", "--out", DATA, "--layers", str(LAYERS)],
            )
            links.slow_down(container, arguments.megabits)
        found = {placed_by: measure(cluster, placed_by) for placed_by in PLACED_BY}
    if arguments.plot:
        plot(arguments.plot, found, arguments.megabits)
    where = "; ".join(
        f"{PLACED_BY[placed_by]}: {', '.join('+'.join(one['nodes']) for one in engines)}"
        for placed_by, engines in found.items()
    )
    show(
        rows(found["upstream"], found["ours"]),
        [f"nodes of each engine's workers, {where}", f"{arguments.megabits} Mbit/s between the nodes"],
        arguments.json,
        "upstream",
    )
    return 0


if __name__ == "__main__":
    run(with_docker_errors(main))
