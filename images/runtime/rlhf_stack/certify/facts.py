"""The rung ``facts``: what every node of the cluster is."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_stack.certify.ladder import Found, Place
from rlhf_stack.certify.model import Machine, Measurement

SECONDS = 60.0


def climb(place: Place) -> Found:
    """Collect the facts of `rlhf-stack doctor` on each node; the details are them, by address."""
    from rlhf_stack.certify.on_cluster import node_report

    nodes = node_report(place, SECONDS)
    found = machines(nodes)
    measurements = [
        Measurement("nodes", len(nodes)),
        Measurement("GPUs", sum(machine.gpus for machine in found)),
        Measurement("fake GPUs", sum(machine.fake_gpus for machine in found)),
    ]
    return Found(measurements, {node["address"]: node for node in nodes}, differences(nodes))


def differences(nodes: Sequence[Mapping[str, Any]]) -> str:
    """What differs between nodes, "" if nothing does; a node without GPUs needs no driver."""
    with_gpus = [node for node in nodes if node["gpus"]]
    compared = {"driver": with_gpus, "versions": nodes, "patches": nodes}
    found = [name for name, several in compared.items() if len({str(node[name]) for node in several}) > 1]
    if not found:
        return ""
    return f"nodes differ in {' and '.join(found)}: `rlhf-stack doctor` lists the differences"


def machines(nodes: Sequence[Mapping[str, Any]]) -> list[Machine]:
    """The machines of a certificate, from the facts of nodes as JSON values."""
    return [
        Machine(
            int(node["gpus"]),
            ", ".join(sorted({gpu["name"] for gpu in node["gpu_report"]["gpus"]})),
            str(node["driver"]),
            max((adapter["megabits"] for adapter in node["rdma"]["adapters"]), default=0) / 1000,
            0 if node["gpus"] else int(node["ray_gpus"]),
        )
        for node in nodes
    ]
