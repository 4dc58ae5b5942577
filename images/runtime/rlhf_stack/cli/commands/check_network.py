"""Test the weight-sync network between all nodes of the running cluster before training.

Creates the weight-sync process group with the same code and backend as a run, and sends one bucket in both
directions between every two GPU nodes, then from the trainer to all engine workers at once. With more than 16
nodes it tests each with the next one, and what fails again with another partner. Compares every byte,
measures the rate, and reports which links are slow or broken and which variable usually fixes them. Run it on
any node of the cluster while nothing trains: with NCCL, each rank takes a GPU.

  rlhf-stack check-network -- python -m openrlhf.cli.train_ppo_ray ...   # the ranks of this run, as placed
  rlhf-stack check-network                                               # one engine worker per node
  rlhf-stack check-network --backend gloo --size 256 --floor 1.0
  rlhf-stack check-network --json | jq '.links[] | select(.verdict != "ok")'

Exit code 1 if a link is broken, slow, or corrupts data. A link is slow below the floor, or below half of
the median. The floor is 0.1 GB/s, or 10 % of the link's speed if that is more: the speed of the RDMA
adapters with NCCL if both nodes have them, otherwise that of the interfaces, of which at most 0.5 GB/s are
required. The speed of a virtual interface is unknown. --floor sets the floor of every link.

--json prints rlhf-stack/rehearse/1: `is_well`, `backend`, `floor`, `nodes` (address, host, used: the
configured interface, interfaces: name, address, network, megabits: null if unknown; rdma_megabits: the
speed of the fastest RDMA adapter, null without one), `links` (first and second: indices of nodes; forth and
back: GB/s, null if the transfer failed; verdict: ok, slow, one way, cannot talk or wrong data; why, remedy,
floor: the GB/s below which it is slow) and `group` (sender, receivers, bytes, connect_seconds, seconds per
receiver, wrong: receivers with corrupted data, error), null if a link failed first.
"""

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from rlhf_stack.cli import run_options
from rlhf_stack.cli.json_output import print_json
from rlhf_stack.cli.option_types import megabytes, positive_float, seconds
from rlhf_stack.telemetry import run_log
from rlhf_stack.telemetry.run_log import messages

if TYPE_CHECKING:
    from rich.table import Table

    from rlhf_stack.diagnostics.network_check import Attempt, NetworkReport
    from rlhf_stack.openrlhf.run_spec import Run


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the transfer and the output."""
    parser.add_argument(
        "--backend",
        choices=("nccl", "gloo"),
        help="default: that of the run, else RLHF_STACK_SYNC_BACKEND, otherwise NCCL on GPUs and gloo on "
        "CPUs; for auto NCCL, which a run tries first",
    )
    parser.add_argument(
        "--size",
        type=megabytes,
        default=64 * 10**6,
        metavar="MB",
        help="size of the bucket, in 10^6 bytes or as 64MiB (64)",
    )
    parser.add_argument(
        "--floor",
        type=positive_float,
        metavar="GB/S",
        help="a link below this rate, in 10^9 bytes/s, is slow (default: by its speed, see above)",
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=30.0,
        metavar="SECONDS",
        help="for each rendezvous and each transfer (30)",
    )
    parser.add_argument("--json", action="store_true", help="print rlhf-stack/rehearse/1 (see above)")
    run_options.add_command_option(parser)


def run(options: argparse.Namespace) -> int:
    """Check the network and print the result; return 1 if a run could not sync at the floor."""
    from rlhf_stack.cluster.connect import connected
    from rlhf_stack.diagnostics.network_check import check_network
    from rlhf_stack.diagnostics.network_check.ranks import one_worker_per_node, ranks_of_run

    words = run_options.command_words(options) if options.command_line else ()
    with run_options.environment_of_run(words) as variables:
        planned = run_options.parse_run(options)[0] if words else None
        run_log.configure_messages()
        with connected():
            report = check_network(
                options.backend or _default_backend(planned),
                options.size,
                options.floor,
                options.timeout,
                ranks_of_run(planned.request) if planned else one_worker_per_node,
                progress=messages.info,
                variables=variables,
            )
    if options.json:
        print_json("rehearse", 1, is_well=report.is_well, **asdict(report))
    else:
        _show(report)
    return 0 if report.is_well else 1


def _default_backend(planned: "Run | None") -> str:
    """The backend of a run, or of the environment; without GPUs gloo, as in a run."""
    from rlhf_stack.accelerator import devices
    from rlhf_stack.config import env_vars

    requested = planned.sync_backend if planned else env_vars.sync_backend()
    return requested if requested == "gloo" else devices.collective_backend()


def _show(report: "NetworkReport") -> None:
    from rich.console import Console

    console = Console()
    if report.links:
        console.print(_table(report))
    for link in report.links:
        names = f"{report.nodes[link.first].host} and {report.nodes[link.second].host}"
        for text in filter(None, (link.why, link.remedy)):
            console.print(f"{names}: {text}", markup=False, highlight=False)
    console.print(_group(report, report.group), markup=False, highlight=False)


def _table(report: "NetworkReport") -> "Table":
    from rich.table import Table

    table = Table(title=report.backend, title_justify="left")
    for name in ("node", "node", "forth GB/s", "back GB/s", "floor GB/s", ""):
        table.add_column(name, justify="right" if "GB/s" in name else "left")
    for link in report.links:
        rates = ("-" if rate is None else f"{rate:.2f}" for rate in (link.forth, link.back, link.floor))
        nodes = (
            f"{node.host} {node.address}" for node in (report.nodes[link.first], report.nodes[link.second])
        )
        table.add_row(*nodes, *rates, link.verdict, style=None if link.verdict == "ok" else "bold")
    return table


def _group(report: "NetworkReport", group: "Attempt | None") -> str:
    if group is None:
        return "the whole group was not tested: fix the links first"
    if group.error:
        return f"the whole group failed: {group.error}"
    slowest = min(range(len(group.rates)), key=lambda index: group.rates[index])
    where = report.nodes[group.receivers[slowest]].host
    wrong = ", ".join(report.nodes[node].host for node in group.wrong)
    return (
        f"the whole group, {len(group.receivers) + 1} ranks: connected in {group.connect_seconds:.1f} s, "
        f"slowest rank {group.rates[slowest]:.2f} GB/s, on {where}"
        + (f"; corrupted data on {wrong}" if wrong else "")
    )
