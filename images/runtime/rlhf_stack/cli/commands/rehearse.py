"""Send a bucket between every two nodes of the running cluster, before there is anything to train.

Builds the group by which weights will be sent, with the same code and backend, and sends one bucket each way
between every two nodes that have GPUs, then from the trainer to all engine workers at once. Compares every
byte, measures the rate, and says which two nodes are slow or cannot talk, and which variable usually mends
it. Run it on any node of the cluster, while nothing trains: with NCCL it takes a GPU for each rank.

  rlhf-stack rehearse -- python -m openrlhf.cli.train_ppo_ray ...   # the group of this run, where it would be
  rlhf-stack rehearse                                               # an engine worker on every node
  rlhf-stack rehearse --backend gloo --size 256 --floor 1.0
  rlhf-stack rehearse --json | jq '.links[] | select(.verdict != "ok")'

Exit code 1 if a link is dead, slow, or changes bytes.

--json prints rlhf-stack/rehearse/1: `is_well`, `backend`, `floor`, `nodes` (address, host, used: the
interface that was asked for, interfaces: name, address, network, megabits), `links` (first and second: nodes
by number, from 0; forth and back: GB/s, null if nothing came; verdict: ok, slow, one way, cannot talk or
wrong data; why, remedy) and `group` (sender, receivers, bytes, connect_seconds, seconds of each receiver,
wrong: receivers that got other bytes, error), null if a link failed before it.
"""

import argparse
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from rlhf_stack.cli import option_types, run_options
from rlhf_stack.cli.json_output import show_json

if TYPE_CHECKING:
    from rich.table import Table

    from rlhf_stack.diagnostics.network_check import Attempt, Report

MEGA = 10**6


def arguments(parser: argparse.ArgumentParser) -> None:
    """What is sent, and what is asked of it."""
    parser.add_argument(
        "--backend",
        choices=("nccl", "gloo"),
        help="as --vllm.sync_backend; what this image syncs by if not given",
    )
    parser.add_argument(
        "--size",
        type=option_types.positive,
        default=64.0,
        metavar="MB",
        help="of the bucket, 10^6 bytes (64)",
    )
    parser.add_argument(
        "--floor",
        type=option_types.positive,
        default=0.1,
        metavar="GB/S",
        help="10^9 bytes a second below which a link is slow (0.1, about 1 Gbit/s)",
    )
    parser.add_argument(
        "--timeout",
        type=option_types.positive,
        default=30.0,
        metavar="SECONDS",
        help="for a rendezvous, and for a send (30)",
    )
    parser.add_argument("--json", action="store_true", help="print rlhf-stack/rehearse/1 (see above)")
    run_options.command_option(parser)


def run(options: argparse.Namespace) -> int:
    """Rehearse and show it; 1 if a run could not sync at the floor."""
    from rlhf_stack.accelerator import devices
    from rlhf_stack.cluster.connect import connected
    from rlhf_stack.config import env_vars
    from rlhf_stack.diagnostics.network_check import rehearse
    from rlhf_stack.diagnostics.network_check.ranks import of_run, once_each

    ranks = of_run(run_options.asked_run(options)[0].request) if options.command_line else once_each
    with connected():
        report = rehearse(
            options.backend or env_vars.sync_backend("nccl" if devices.is_gpu() else "gloo"),
            int(options.size * MEGA),
            options.floor,
            options.timeout,
            ranks,
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )
    if options.json:
        show_json("rehearse", 1, is_well=report.is_well, **asdict(report))
    else:
        _show(report)
    return 0 if report.is_well else 1


def _show(report: "Report") -> None:
    from rich.console import Console

    console = Console()
    if report.links:
        console.print(_table(report))
    for link in report.links:
        names = f"{report.nodes[link.first].host} and {report.nodes[link.second].host}"
        for text in filter(None, (link.why, link.remedy)):
            console.print(f"{names}: {text}", markup=False, highlight=False)
    console.print(_group(report, report.group), markup=False, highlight=False)


def _table(report: "Report") -> "Table":
    from rich.table import Table

    table = Table(title=f"{report.backend}, floor {report.floor:g} GB/s", title_justify="left")
    for name in ("node", "node", "there GB/s", "back GB/s", ""):
        table.add_column(name, justify="right" if "GB/s" in name else "left")
    for link in report.links:
        rates = ("-" if rate is None else f"{rate:.2f}" for rate in (link.forth, link.back))
        nodes = (
            f"{node.host} {node.address}" for node in (report.nodes[link.first], report.nodes[link.second])
        )
        table.add_row(*nodes, *rates, link.verdict, style=None if link.verdict == "ok" else "bold")
    return table


def _group(report: "Report", group: "Attempt | None") -> str:
    if group is None:
        return "the whole group was not tried: mend the links first"
    if group.error:
        return f"the whole group failed: {group.error}"
    slowest = min(range(len(group.rates)), key=lambda index: group.rates[index])
    where = report.nodes[group.receivers[slowest]].host
    wrong = ", ".join(report.nodes[node].host for node in group.wrong)
    return (
        f"the whole group, {len(group.receivers) + 1} ranks: connected in {group.connect_seconds:.1f} s, "
        f"{group.rates[slowest]:.2f} GB/s at the slowest, on {where}"
        + (f"; other bytes than were sent arrived on {wrong}" if wrong else "")
    )
