"""rlhf_stack.diagnostics.doctor: RDMA. Each state of a node, and what is collected from this machine."""

import dataclasses
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
from rlhf_stack.diagnostics.doctor import checks, collect_rdma
from rlhf_stack.diagnostics.doctor.facts import Rdma
from rlhf_stack.diagnostics.doctor.rdma import check_rdma
from rlhf_stack.diagnostics.network_adapters import RdmaAdapter
from rlhf_stack.known_bad.finding import Finding

from tests.unit.rlhf_stack.diagnostics.facts import GPU_NODE

INFINIBAND, EFA = RdmaAdapter("mlx5_0", 400_000), RdmaAdapter("rdmap16s27", 100_000, is_efa=True)
WELL = Rdma((INFINIBAND,), verbs=1, peer_memory=True, kernel="6.8.0-31-generic")


def found(node: dict[str, Any] | None = None, **rdma: Any) -> list[Finding]:
    """The findings for a node with GPUs and one working adapter, with changes to the node and its RDMA."""
    facts = dataclasses.replace(WELL, **rdma)
    return list(check_rdma(dataclasses.replace(GPU_NODE, rdma=facts, **(node or {}))))


def bad(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.id, finding.severity) for finding in findings if finding.severity != "ok"]


def test_a_node_without_rdma_is_ok() -> None:
    assert [(one.id, one.severity) for one in check_rdma(GPU_NODE)] == [("rdma", "ok")]
    assert check_rdma in checks.CHECKS


@pytest.mark.parametrize(
    ("node", "rdma", "expected"),
    [
        ({}, {}, []),
        ({"accelerator": "rocm"}, {"peer_memory": False}, []),
        ({"accelerator": "cpu", "gpus": 0}, {"verbs": None, "memlock": 65536}, []),
        ({"accelerator": None}, {"verbs": None}, []),
        ({}, {"adapters": (dataclasses.replace(INFINIBAND, accessible=False),)}, [("rdma", "warning")]),
        ({}, {"adapters": (INFINIBAND, dataclasses.replace(INFINIBAND, accessible=False))}, []),
        ({}, {"adapters": (dataclasses.replace(INFINIBAND, active=False),)}, [("rdma", "note")]),
        ({"variables": {"NCCL_IB_DISABLE": "1"}}, {"verbs": None}, [("rdma", "note")]),
        ({"variables": {"NCCL_NET": "Socket"}}, {}, [("rdma", "note")]),
        ({}, {"verbs": None}, [("rdma", "warning")]),
        ({}, {"verbs": 0}, [("rdma", "warning")]),
        ({}, {"memlock": 8 << 20}, [("memlock", "warning")]),
        ({}, {"verbs": None, "memlock": 65536}, [("rdma", "warning"), ("memlock", "warning")]),
        ({}, {"peer_memory": False}, [("gpudirect", "note")]),
        ({}, {"peer_memory": False, "open_driver": True}, []),
        ({}, {"peer_memory": False, "open_driver": True, "kernel": "5.4.0-150"}, [("gpudirect", "note")]),
        ({}, {"peer_memory": False, "open_driver": True, "kernel": ""}, [("gpudirect", "note")]),
        ({"gpus": 0}, {"peer_memory": False}, []),
        ({}, {"adapters": (EFA,)}, [("efa", "warning")]),
        ({}, {"adapters": (EFA,), "net_plugin": "libnccl-net.so", "peer_memory": False}, []),
        (
            {},
            {"adapters": (dataclasses.replace(EFA, accessible=False),), "net_plugin": "libnccl-net.so"},
            [("rdma", "warning")],
        ),
    ],
)
def test_each_missing_requirement_is_found_and_nothing_else(
    node: dict[str, Any], rdma: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    findings = found(node, **rdma)
    assert bad(findings) == expected
    assert all(finding.remedy for finding in findings if finding.severity == "warning")


@pytest.mark.parametrize(
    ("rdma", "evidence", "remedy"),
    [
        ({"adapters": (dataclasses.replace(INFINIBAND, accessible=False),)}, "mlx5_0 400 Gbit/s", "--device"),
        ({"verbs": None, "verbs_error": "OSError: no file"}, "OSError: no file", "ibverbs-providers"),
        ({"verbs": 0, "verbs_error": "couldn't load driver"}, "couldn't load driver", "ibverbs-providers"),
        ({"memlock": 65536}, "mlx5_0", "--ulimit memlock=-1"),
        ({"adapters": (EFA,)}, "rdmap16s27 100 Gbit/s", "images/examples/efa.Dockerfile"),
    ],
)
def test_a_finding_names_adapter_and_remedy(rdma: dict[str, Any], evidence: str, remedy: str) -> None:
    (finding,) = (one for one in found(**rdma) if one.severity == "warning")
    assert evidence in finding.evidence
    assert remedy in finding.remedy


def test_the_limit_is_in_the_unit_of_ulimit() -> None:
    assert "is 64 KiB" in next(one.what for one in found(memlock=65536) if one.id == "memlock")


def test_without_adapters_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_rdma, "rdma_adapters", lambda: ())
    monkeypatch.setattr(collect_rdma, "_run", pytest.fail)
    assert collect_rdma.collect_rdma({}) == Rdma()


def test_facts_are_collected_on_a_node_with_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin is looked up only where EFA needs it."""
    monkeypatch.setattr(collect_rdma, "rdma_adapters", lambda: (INFINIBAND,))
    monkeypatch.setattr(collect_rdma, "VERBS", "print(1)")
    monkeypatch.setattr(collect_rdma, "PLUGIN", "import sys; print(sys.argv[1])")
    facts = collect_rdma.collect_rdma({})
    assert (facts.adapters, facts.verbs, facts.verbs_error, facts.net_plugin) == ((INFINIBAND,), 1, "", "")
    assert facts.kernel
    monkeypatch.setattr(collect_rdma, "rdma_adapters", lambda: (EFA,))
    assert collect_rdma.collect_rdma({}).net_plugin == "libnccl-net.so"
    assert collect_rdma.collect_rdma({"NCCL_NET_PLUGIN": "ofi"}).net_plugin == "ofi"


def test_a_verbs_library_that_cannot_be_loaded_is_an_error_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collect_rdma, "VERBS", collect_rdma.VERBS.replace("libibverbs.so.1", "no-such.so"))
    count, error = collect_rdma.verbs_count()
    assert count is None
    assert error.startswith("OSError: no-such.so")


def test_the_verbs_library_of_this_machine_lists_its_adapters() -> None:
    """The number of adapters is None without the library, and 0 on a machine without adapters."""
    count, error = collect_rdma.verbs_count()
    assert count is not None or "libibverbs.so.1" in error


def test_a_probe_that_hangs_or_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_rdma, "PROBE_SECONDS", 0.2)
    monkeypatch.setattr(collect_rdma, "VERBS", "import time; time.sleep(60)")
    count, error = collect_rdma.verbs_count()
    assert count is None
    assert "timed out" in error
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert collect_rdma.verbs_count()[0] is None


@pytest.mark.skipif(sys.platform != "linux", reason="libc.so.6 is of Linux")
@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, ""), ({"NCCL_NET_PLUGIN": "libc.so.6"}, "libc.so.6"), ({"NCCL_NET_PLUGIN": "no-such"}, "")],
)
def test_the_plugin_is_the_first_name_that_loads(variables: dict[str, str], expected: str) -> None:
    """This machine has no plugin; any library takes its place."""
    assert collect_rdma.net_plugin(variables) == expected


@pytest.mark.parametrize(
    ("capabilities", "limit", "expected"),
    [
        ("0000000000000000", 65536, 65536),
        ("0000000000004000", 65536, -1),
        ("000001ffffffffff", 65536, -1),
        ("0000000000000000", -1, -1),
    ],
)
def test_locked_memory_is_unlimited_by_ulimit_or_capability(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capabilities: str, limit: int, expected: int
) -> None:
    status = tmp_path / "status"
    status.write_text(f"Name:\tpython\nCapInh:\t0000000000000000\nCapEff:\t{capabilities}\n")
    monkeypatch.setattr(collect_rdma, "STATUS", status)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert collect_rdma.memlock() == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build", True),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12", False),
    ],
)
def test_the_open_driver_is_recognized(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, expected: bool
) -> None:
    monkeypatch.setattr(collect_rdma, "NVIDIA_DRIVER", tmp_path / "version")
    assert not collect_rdma.is_open_driver()
    (tmp_path / "version").write_text(text)
    assert collect_rdma.is_open_driver() == expected
