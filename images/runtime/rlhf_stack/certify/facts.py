"""The rung ``facts``: what every node of the cluster is."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_stack.certify.ladder import Found, Place
from rlhf_stack.certify.model import Machine, Measurement
from rlhf_stack.inputs.text import first_names

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
    found = [
        name
        for name, several in compared.items()
        if len({json.dumps(node[name], sort_keys=True) for node in several}) > 1
    ]
    problems = [different_images(nodes)]
    if found:
        problems.append(f"nodes differ in {' and '.join(found)}: `rlhf-stack doctor` lists the differences")
    return "; ".join(filter(None, problems))


def different_images(nodes: Sequence[Mapping[str, Any]]) -> str:
    """The inputs digest of each image and its nodes if they are several, otherwise ""."""
    by_digest: dict[str, list[str]] = {}
    for node in nodes:
        by_digest.setdefault(str(node["inputs"]), []).append(str(node["address"]))
    if len(by_digest) < 2:
        return ""
    named = (
        f"{f'sha256:{inputs}' if inputs else 'an unknown one'} on {first_names(addresses)}"
        for inputs, addresses in by_digest.items()
    )
    return f"nodes run different images, by the digests of their inputs: {', '.join(named)}"


def machines(nodes: Sequence[Mapping[str, Any]]) -> list[Machine]:
    """The machines of a certificate, from the facts of nodes as JSON values."""
    return [
        Machine(
            int(node["gpus"]),
            ", ".join(sorted(set(node["gpu_models"]))),
            str(node["driver"]),
            max((adapter["megabits"] for adapter in node["rdma"]["adapters"]), default=0) / 1000,
            0 if node["gpus"] else int(node["ray_gpus"]),
        )
        for node in nodes
    ]
