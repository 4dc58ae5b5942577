"""Seconds to plan a run on large clusters, and to predict Ray's placement there.

``PYTHONPATH=images/runtime python -m tests.bench.placement [--json]``; a few seconds, no Docker. There is no
comparison, as upstream does not plan. The notes report how the time grows from 1,000 to 10,000 nodes.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

from rlhf_stack.placement import Engines, FreeNode, Group, Request, plan
from rlhf_stack.placement.model import ENGINES
from rlhf_stack.planning.upstream_placement import upstream_layout

from tests.bench.results import Row, show

SIZES = (1_000, 10_000)
GPUS = 8
REPEAT = 5


def requests(nodes: int) -> dict[str, Request]:
    """Return runs that use all GPUs of ``nodes`` nodes."""
    half = nodes // 2
    actor = Group("actor", half, GPUS)
    return {
        "separate, TP 4": Request((actor,), Engines(half * 2, 4), tp_sp_size=8),
        "shared, TP 4": Request((Group("actor", nodes, GPUS),), Engines(nodes * 2, 4, "actor"), tp_sp_size=8),
        "engines of two nodes": Request((actor,), Engines(half // 2, 16)),
    }


def cluster(nodes: int, uneven: bool) -> list[FreeNode]:
    """Return ``nodes`` nodes; uneven ones have between 5 and 8 GPUs free."""
    return [
        FreeNode(f"10.{index >> 8}.{index & 255}.1", GPUS - (index % 4 if uneven else 0), 64, GPUS)
        for index in range(nodes)
    ]


def seconds(action: Callable[[], object]) -> float:
    """Return the median seconds of `REPEAT` runs."""
    times = []
    for _ in range(REPEAT):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.placement", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    measured: dict[str, list[float]] = {}
    for nodes in SIZES:
        even = cluster(nodes, uneven=False)
        for name, request in requests(nodes).items():
            measured.setdefault(name, []).append(seconds(partial(plan, even, request)))
        engines = Request(engines=Engines(nodes, 4))
        uneven = cluster(nodes, uneven=True)
        measured.setdefault("uneven nodes, TP 4", []).append(seconds(partial(plan, uneven, engines)))
    few = cluster(128, uneven=False)
    ray = seconds(lambda: upstream_layout(few, Request(engines=Engines(256, 4)), [ENGINES]))
    rows = [Row(f"plan 10,000 x 8 GPUs, {name}", "s", times[-1]) for name, times in measured.items()]
    rows.append(Row("predict Ray's placement, 128 x 8 GPUs", "s", ray))
    notes = [
        f"{name}: {times[-1] / times[0]:.1f} times that of 1,000 nodes" for name, times in measured.items()
    ]
    show(rows, notes, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
