"""Show what the run of this cluster does now: engines and their tokens/s, phase, last sync, GPUs, what waits.

Tokens/s and GB/s are what trainer and engines report to Ray's metrics at each weight sync; phase, step and
the places of the engines are in the events of the run (RLHF_STACK_EVENTS, or --events); memory of GPUs is
what Ray's agents measure; placement groups that wait, and why, are Ray's own. Ray's dashboard shows the rest.

  rlhf-stack top                        until Ctrl-C, anew every 2 seconds
  rlhf-stack top --once --events /shared/events
  rlhf-stack top --json | jq '.engines[] | select(.ratio < 0.5)'

Exit code: 0; with --once and --json 1 if a placement group waits.

--json prints rlhf-stack/top/1 once: `phase`, `step`, `reward`, `sync` (GB/s), `engines` (index, places,
tokens_per_second, and ratio to the median), `gpus` (node, index, used and total bytes) and `waiting` (id,
bundles, reason); null or empty where nothing is told.
"""

import argparse
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf_stack.cleanup import process_table
from rlhf_stack.cli.json_output import show_json
from rlhf_stack.cluster.connect import connected
from rlhf_stack.config import env_vars
from rlhf_stack.diagnostics.monitor import metrics
from rlhf_stack.diagnostics.monitor.state import State, state
from rlhf_stack.errors import UserError
from rlhf_stack.telemetry import events

PAUSE_SECONDS, SCRAPE_SECONDS = 2.0, 3.0
UNKNOWN = "?"


def arguments(parser: argparse.ArgumentParser) -> None:
    """How long, and where the events are."""
    parser.add_argument("--once", action="store_true", help="show it once")
    parser.add_argument("--events", metavar="DIR", help="the directory of RLHF_STACK_EVENTS")
    parser.add_argument("--json", action="store_true", help="print rlhf-stack/top/1 (see above)")


def run(options: argparse.Namespace) -> int:
    """Show it once, or until it is interrupted."""
    folder = options.events or os.environ.get(env_vars.EVENTS)
    if options.events and not Path(options.events).is_dir():
        raise UserError(f"{options.events}: there is no such directory")
    address = process_table.gcs_address(process_table.table())
    if address is None:
        raise UserError("no Ray node runs here: run this on a node of the cluster, in its container")
    with connected(address):
        if options.json or options.once:
            now = _look(folder)
            if options.json:
                show_json("top", 1, **asdict(now))
            else:
                _console().print(_picture(now))
            return 1 if now.waiting else 0
        from rich.live import Live

        with Live(_picture(_look(folder)), console=_console(), auto_refresh=False) as live:
            while True:
                time.sleep(PAUSE_SECONDS)
                live.update(_picture(_look(folder)), refresh=True)


def _look(folder: str | None) -> State:
    import ray

    endpoints = [
        (node["NodeManagerAddress"], int(node["MetricsExportPort"])) for node in ray.nodes() if node["Alive"]
    ]
    told = events.read(Path(folder)) if folder and Path(folder).is_dir() else []
    return state(told, metrics.scrape(endpoints, SCRAPE_SECONDS), ray.util.placement_group_table())


def _console() -> Any:
    from rich.console import Console

    return Console(highlight=False)


def _picture(now: State) -> Any:
    """Tables under each other; one that would be empty is left out."""
    from rich.console import Group
    from rich.table import Table

    sync = f"{now.sync:.2f} GB/s" if now.sync is not None else UNKNOWN
    reward = f", reward {now.reward:.3f}" if now.reward is not None else ""
    step = UNKNOWN if now.step is None else str(now.step)
    parts: list[Any] = [f"phase {now.phase or UNKNOWN}, step {step}{reward}, last sync {sync}"]
    table = Table("engine", "where", "tokens/s", "of the median")
    for engine in now.engines:
        table.add_row(
            str(engine.index),
            "\n".join(engine.places) or UNKNOWN,
            UNKNOWN if engine.tokens_per_second is None else f"{engine.tokens_per_second:.0f}",
            UNKNOWN if engine.ratio is None else f"{engine.ratio:.2f}",
        )
    memory = Table("node", "GPU", "memory")
    for gpu in now.gpus:
        memory.add_row(gpu.node, gpu.index, f"{gpu.used / 1e9:.1f} of {gpu.total / 1e9:.1f} GB")
    waiting = Table("placement group that waits", "asks for", "why")
    for group in now.waiting:
        waiting.add_row(group.id[:12], "\n".join(group.bundles), group.reason)
    return Group(*parts, *(part for part in (table, memory, waiting) if part.row_count))
