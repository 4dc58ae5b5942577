"""Monitor the run of this cluster: tokens/s and restarts per engine, phase, last sync, GPU memory, groups.

Trainer and engines report tokens/s and GB/s at each weight sync; of several runs the newest is shown. Phase,
step and the GPUs of each engine come from the event log of the run (RLHF_STACK_EVENTS, or --events), GPU
memory from Ray's node agents, and pending placement groups with their reason from Ray. An agent reports each
measurement to one reader: while this runs, Prometheus misses some. For anything else see Ray's dashboard.

  rlhf-stack top                        refresh every 2 seconds until Ctrl-C
  rlhf-stack top --once --events /shared/events
  rlhf-stack top --json | jq '.engines[] | select(.ratio < 0.5)'

Exit code 0; with --once or --json, 1 if a placement group is pending.

--json prints rlhf-stack/top/1 once: `phase`, `step`, `reward`, `sync` (GB/s), `engines` (index, places: node
and GPU, tokens_per_second, ratio to the median, restarts), `lost_seconds` (waits for lost engines),
`weight_version`, `gpus` (node, index, used and total bytes) and `waiting` (pending placement groups: id,
bundles, reason); unknown values are null or empty.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf_stack.cleanup import process_table
from rlhf_stack.cli.json_output import print_json
from rlhf_stack.cli.option_types import path
from rlhf_stack.cluster import run_metrics
from rlhf_stack.cluster.connect import connected
from rlhf_stack.config import env_vars
from rlhf_stack.diagnostics.monitor import metrics
from rlhf_stack.diagnostics.monitor.state import GPU_AVAILABLE, GPU_USED, RunState, run_state
from rlhf_stack.errors import UserError
from rlhf_stack.lazy import ray
from rlhf_stack.telemetry import events

PAUSE_SECONDS, SCRAPE_SECONDS = 2.0, 3.0
SCRAPE_PAUSE_SECONDS = 10.0  # what is scraped is lost for Prometheus, and Ray measures every few seconds
UNKNOWN = "?"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the event log and the output."""
    parser.add_argument("--once", action="store_true", help="print the state once")
    parser.add_argument(
        "--events", type=path, metavar="DIR", help="directory of the event log (RLHF_STACK_EVENTS)"
    )
    parser.add_argument("--json", action="store_true", help="print rlhf-stack/top/1 (see above)")


def run(options: argparse.Namespace) -> int:
    """Print the state once, or refresh it until interrupted."""
    given = os.environ.get(env_vars.EVENTS)
    folder = options.events or (Path(given) if given else None)
    if options.events and not options.events.is_dir():
        raise UserError(f"{options.events}: no such directory")
    address = process_table.gcs_address(process_table.snapshot())
    if address is None:
        raise UserError(
            "no Ray node runs on this machine: run this on a node of the cluster, in its container"
        )
    if options.json or options.once:
        with connected(address):
            now = _current_state(folder, GpuSamples())
        if options.json:
            print_json("top", 1, **asdict(now))
        else:
            _console().print(_tables(now))
        return 1 if now.waiting else 0
    from rich.live import Live

    console = _console()  # before the connection, which redirects the standard output
    gpus = GpuSamples()
    with (
        connected(address),
        Live(_tables(_current_state(folder, gpus)), console=console, auto_refresh=False) as live,
    ):
        while True:
            time.sleep(PAUSE_SECONDS)
            live.update(_tables(_current_state(folder, gpus)), refresh=True)


class GpuSamples:
    """The last samples of the GPUs' memory of each live node; an agent has none between two measurements."""

    def __init__(self) -> None:
        self._next = 0.0
        self._last: dict[tuple[str, str, str], metrics.Sample] = {}

    def now(self, endpoints: Sequence[tuple[str, int]]) -> list[metrics.Sample]:
        """Scrape the agents at ``endpoints`` (address, port) if it is time; return the last samples."""
        if time.monotonic() >= self._next:
            for one in metrics.scrape(endpoints, SCRAPE_SECONDS):
                if one.name in (GPU_USED, GPU_AVAILABLE):
                    self._last[one.node, one.name, one.tags.get("gpuindex", "")] = one
            self._next = time.monotonic() + SCRAPE_PAUSE_SECONDS
        alive = {address for address, _ in endpoints}
        return [one for one in self._last.values() if one.node in alive]


def _current_state(folder: Path | None, gpus: GpuSamples) -> RunState:
    endpoints = [
        (node["NodeManagerAddress"], int(node["MetricsExportPort"])) for node in ray.nodes() if node["Alive"]
    ]
    entries = events.read_recent(folder) if folder and folder.is_dir() else []
    samples = [metrics.Sample("", *one) for one in run_metrics.published()] + gpus.now(endpoints)
    return run_state(entries, samples, ray.util.placement_group_table())


def _console() -> Any:
    from rich.console import Console

    return Console(highlight=False, file=sys.stdout)


def _tables(now: RunState) -> Any:
    """The state as a line and tables; empty tables are omitted."""
    from rich.console import Group
    from rich.table import Table

    sync = f"{now.sync:.2f} GB/s" if now.sync is not None else UNKNOWN
    reward = f", reward {now.reward:.3f}" if now.reward is not None else ""
    step = UNKNOWN if now.step is None else str(now.step)
    version = f", weights of version {now.weight_version}" if now.weight_version is not None else ""
    lost = f", {now.lost_seconds:.0f} s lost by restarts of engines" if now.lost_seconds else ""
    parts: list[Any] = [f"phase {now.phase or UNKNOWN}, step {step}{reward}, last sync {sync}{version}{lost}"]
    table = Table("engine", "GPUs", "tokens/s", "of median", "restarts")
    for engine in now.engines:
        table.add_row(
            str(engine.index),
            "\n".join(engine.places) or UNKNOWN,
            UNKNOWN if engine.tokens_per_second is None else f"{engine.tokens_per_second:.0f}",
            UNKNOWN if engine.ratio is None else f"{engine.ratio:.2f}",
            str(engine.restarts),
        )
    memory = Table("node", "GPU", "memory")
    for gpu in now.gpus:
        memory.add_row(gpu.node, gpu.index, f"{gpu.used / 1e9:.1f} of {gpu.total / 1e9:.1f} GB")
    waiting = Table("pending placement group", "requests", "reason")
    for group in now.waiting:
        waiting.add_row(group.id[:12], "\n".join(group.bundles), group.reason)
    return Group(*parts, *(part for part in (table, memory, waiting) if part.row_count))
