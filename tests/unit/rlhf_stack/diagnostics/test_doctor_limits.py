"""rlhf_stack.diagnostics.doctor: each limit of a check, just under, at and over it."""

import dataclasses
from typing import Any

import pytest
from rlhf_stack.diagnostics.doctor import checks, comparison
from rlhf_stack.diagnostics.doctor.facts import Disk, NodeAnswer, Rdma
from rlhf_stack.diagnostics.network_adapters import RdmaAdapter
from rlhf_stack.inputs.text import first_names
from rlhf_stack.known_bad.finding import Finding

from tests.unit.rlhf_stack.diagnostics.facts import GPU_NODE

GB, GIB, MIB = 10**9, 1 << 30, 1 << 20
ADAPTER = RdmaAdapter("mlx5_0", 400_000)


def severities(findings: list[Finding], name: str) -> list[str]:
    return [finding.severity for finding in findings if finding.id == name]


@pytest.mark.parametrize(
    ("name", "changes", "severity"),
    [
        # The object store needs no more than /dev/shm has; a small /dev/shm alone is a warning below 1 GiB.
        ("shm", {"shm_total": GIB, "resources": {"object_store_memory": GIB}}, "ok"),
        ("shm", {"shm_total": GIB, "resources": {"object_store_memory": GIB + 1.0}}, "error"),
        ("shm", {"shm_total": GIB - 1}, "warning"),
        ("shm", {"shm_free": 128 * MIB}, "ok"),
        ("shm", {"shm_free": 128 * MIB - 1}, "warning"),
        ("shm", {"shm_total": 64 * MIB, "resources": {"object_store_memory": 64.0 * MIB}}, "warning"),
        ("shm", {"shm_total": 0}, "warning"),
        # Open files: a warning below 4096, a note below 65536, unlimited is -1.
        ("ulimit", {"open_files": 0}, "warning"),
        ("ulimit", {"open_files": 4095}, "warning"),
        ("ulimit", {"open_files": 4096}, "note"),
        ("ulimit", {"open_files": 65535}, "note"),
        ("ulimit", {"open_files": 65536}, "ok"),
        ("ulimit", {"open_files": -1}, "ok"),
        # Disks: an error above 95 % used, a warning below 10 GB free.
        ("disk", {"disks": (Disk("/tmp", 1000 * GB, 50 * GB),)}, "ok"),
        ("disk", {"disks": (Disk("/tmp", 1000 * GB, 50 * GB - 1),)}, "error"),
        ("disk", {"disks": (Disk("/tmp", 100 * GB, 10 * GB),)}, "ok"),
        ("disk", {"disks": (Disk("/tmp", 100 * GB, 10 * GB - 1),)}, "warning"),
        ("disk", {"disks": (Disk("/tmp", 200 * GB, 10 * GB),)}, "ok"),
        ("disk", {"disks": (Disk("/tmp", 200 * GB, 10 * GB - 1),)}, "error"),
        ("disk", {"disks": (Disk("/proc", 0, 0),)}, "warning"),
        # GPUs: more than are visible is an error, fewer a note; without a Ray node nothing is declared.
        ("gpus", {"resources": {"GPU": 8.0}}, "ok"),
        ("gpus", {"resources": {"GPU": 8.5}}, "error"),
        ("gpus", {"resources": {"GPU": 7.5}}, "note"),
        ("gpus", {"resources": {}}, "ok"),
        ("gpus", {"gpus": 0, "resources": {}}, "error"),
        # Locked memory is unlimited or too little.
        ("memlock", {"rdma": Rdma((ADAPTER,), verbs=1, memlock=-1)}, "ok"),
        ("memlock", {"rdma": Rdma((ADAPTER,), verbs=1, memlock=1 << 62)}, "warning"),
        ("rdma", {"rdma": Rdma((ADAPTER,), verbs=1)}, "ok"),
        ("rdma", {"rdma": Rdma((ADAPTER,), verbs=0)}, "warning"),
        # DMA-BUF: Linux 5.12 with the open modules.
        ("gpudirect", {"rdma": Rdma((ADAPTER,), verbs=1, open_driver=True, kernel="5.12.0")}, "ok"),
        ("gpudirect", {"rdma": Rdma((ADAPTER,), verbs=1, open_driver=True, kernel="5.11.22")}, "note"),
        ("gpudirect", {"rdma": Rdma((ADAPTER,), verbs=1, open_driver=False, kernel="6.8.0")}, "note"),
        ("gpudirect", {"rdma": Rdma((ADAPTER,), verbs=1, open_driver=True, kernel="?")}, "note"),
    ],
)  # fmt: skip
def test_a_limit_of_a_node(name: str, changes: dict[str, Any], severity: str) -> None:
    assert severities(checks.check_node(dataclasses.replace(GPU_NODE, **changes)), name) == [severity]


@pytest.mark.parametrize(
    ("offset", "error", "reported"),
    [(1.0, 0.0, False), (1.01, 0.0, True), (-1.01, 0.0, True), (1.5, 0.5, False), (-1.51, 0.5, True)],
)
def test_a_clock_is_reported_if_it_certainly_differs(offset: float, error: float, reported: bool) -> None:
    found = comparison.compare_nodes([NodeAnswer("a", GPU_NODE), NodeAnswer("b", GPU_NODE, offset, error)])
    assert severities(found, "clock") == ["warning"] * reported


def test_at_most_three_nodes_are_named() -> None:
    assert first_names(["a", "b", "c"]) == "a, b, c"
    assert first_names(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
