"""The rung ``network``: `rlhf-stack check-network` between every two nodes, then a group of all GPUs."""

from collections.abc import Sequence

from rlhf_stack.accelerator import devices
from rlhf_stack.certify.ladder import Found, NotClimbedError, Place
from rlhf_stack.certify.model import Measurement
from rlhf_stack.certify.on_cluster import nodes_with_gpus
from rlhf_stack.diagnostics.network_check import check_network
from rlhf_stack.placement import FreeNode

SIZE, SMALL_SIZE = 512_000_000, 8_000_000
SECONDS = 60.0


def climb(place: Place) -> Found:
    """Run the check with the backend of a run; a slow link fails the rung, but not between fake GPUs."""
    from dataclasses import asdict

    with nodes_with_gpus(place) as nodes:
        if sum(node.total_gpus for node in nodes) < 2:
            raise NotClimbedError("one GPU: there is no other to send weights to")
        report = check_network(
            devices.collective_backend(),
            SMALL_SIZE if place.small else SIZE,
            None,
            SECONDS,
            ranks=one_rank_per_gpu,
        )
    rates = [rate for link in report.links for rate in (link.forth, link.back) if rate is not None]
    measurements = [Measurement("slowest link between nodes", min(rates), "GB/s")] if rates else []
    if report.group and report.group.rates:
        measurements.append(Measurement("slowest GPU of the group", min(report.group.rates), "GB/s"))
    tolerated = ("ok", "slow") if place.small else ("ok",)
    problems = [
        f"{report.nodes[link.first].host} and {report.nodes[link.second].host}: {link.verdict} {link.why}"
        for link in report.links
        if link.verdict not in tolerated
    ]
    if report.group and (report.group.error or report.group.wrong):
        problems.append(f"the group: {report.group.error or 'wrong data'}")
    return Found(measurements, asdict(report), "; ".join(problems))


def one_rank_per_gpu(nodes: Sequence[FreeNode]) -> list[int]:
    """The node of each rank: the trainer on the first GPU, an engine worker on each other one."""
    return [index for index, node in enumerate(nodes) for _ in range(int(node.total_gpus))]
