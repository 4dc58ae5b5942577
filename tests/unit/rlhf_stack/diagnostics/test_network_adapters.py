"""rlhf_stack.diagnostics.network_adapters: speeds and RDMA adapters in sysfs, and those that NCCL uses."""

from pathlib import Path

import pytest
from rlhf_stack.diagnostics.network_adapters import (
    RdmaAdapter,
    interface_megabits,
    nccl_adapters,
    rate_megabits,
    rdma_adapters,
)


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def adapter(root: Path, name: str, *ports: tuple[str, str], vendor: str = "0x15b3", number: int = 0) -> None:
    """Write an adapter as sysfs has it; ``ports`` are states and rates."""
    write(root / "infiniband" / name / "device" / "vendor", vendor)
    for index, (state, rate) in enumerate(ports, start=1):
        write(root / "infiniband" / name / "ports" / str(index) / "state", state)
        write(root / "infiniband" / name / "ports" / str(index) / "rate", rate)
    write(root / "infiniband_verbs" / f"uverbs{number}" / "ibdev", name)
    write(root / "infiniband_verbs" / "abi_version", "6")


def read(root: Path) -> tuple[RdmaAdapter, ...]:
    return rdma_adapters(root / "infiniband", root / "infiniband_verbs", root / "dev")


def test_a_node_without_rdma_has_no_adapters(tmp_path: Path) -> None:
    assert read(tmp_path) == ()


def test_adapters_have_speed_state_access_and_kind(tmp_path: Path) -> None:
    adapter(tmp_path, "mlx5_0", ("4: ACTIVE", "400 Gb/sec (4X NDR)"), number=3)
    adapter(tmp_path, "mlx5_1", ("1: DOWN", "10 Gb/sec (4X SDR)"), number=1)
    adapter(tmp_path, "mlx5_2", ("1: DOWN", "2.5 Gb/sec"), ("4: ACTIVE", "200 Gb/sec (4X HDR)"), number=2)
    adapter(tmp_path, "rdmap16s27", ("4: ACTIVE", "100 Gb/sec (4X EDR)"), vendor="0x1d0f", number=4)
    write(tmp_path / "dev" / "uverbs3", "")
    assert read(tmp_path) == (
        RdmaAdapter("mlx5_0", 400_000),
        RdmaAdapter("mlx5_1", 0, active=False, accessible=False),
        RdmaAdapter("mlx5_2", 200_000, accessible=False),
        RdmaAdapter("rdmap16s27", 100_000, accessible=False, is_efa=True),
    )


def test_an_adapter_without_readable_files_is_inactive(tmp_path: Path) -> None:
    (tmp_path / "infiniband" / "efa_0").mkdir(parents=True)
    assert read(tmp_path) == (RdmaAdapter("efa_0", 0, active=False, accessible=False, is_efa=True),)


@pytest.mark.parametrize(
    ("text", "megabits"),
    [
        ("400 Gb/sec (4X NDR)", 400_000),
        ("2.5 Gb/sec (1X SDR)", 2500),
        ("25 Gb/sec (1X EDR)", 25_000),
        ("", 0),
        ("unknown", 0),
    ],
)
def test_a_rate_is_parsed(text: str, megabits: int) -> None:
    assert rate_megabits(text) == megabits


@pytest.mark.parametrize(
    ("variables", "used"),
    [
        ({}, ["ib", "efa"]),
        ({"NCCL_IB_DISABLE": "0", "NCCL_NET": "IB"}, ["ib", "efa"]),
        ({"NCCL_IB_DISABLE": "1"}, ["efa"]),
        ({"NCCL_NET": "Socket"}, []),
    ],
)
def test_nccl_uses_active_adapters_that_no_variable_excludes(
    variables: dict[str, str], used: list[str]
) -> None:
    adapters = (RdmaAdapter("ib"), RdmaAdapter("efa", is_efa=True), RdmaAdapter("down", active=False))
    assert [each.name for each in nccl_adapters(adapters, variables)] == used


@pytest.mark.parametrize(
    ("listed", "used"),
    [
        ("", "mlx5_0 mlx5_1 mlx5_10 bnxt_re0 efa_0"),
        ("mlx5", "mlx5_0 mlx5_1 mlx5_10 efa_0"),
        ("mlx5_1,bnxt", "mlx5_1 mlx5_10 bnxt_re0 efa_0"),
        ("=mlx5_1", "mlx5_1 efa_0"),
        ("=mlx5_0:1,mlx5_1:1", "mlx5_0 mlx5_1 efa_0"),
        ("mlx5_0:1,", "mlx5_0 efa_0"),
        ("^mlx5_1", "mlx5_0 bnxt_re0 efa_0"),
        ("^=mlx5_1,bnxt_re0:1", "mlx5_0 mlx5_10 efa_0"),
        ("mlx4", "efa_0"),
    ],
)
def test_nccl_uses_the_adapters_that_its_list_selects(listed: str, used: str) -> None:
    """EFA adapters are those of a plugin, which does not read the list."""
    adapters = [RdmaAdapter(name) for name in ("mlx5_0", "mlx5_1", "mlx5_10", "bnxt_re0")]
    adapters.append(RdmaAdapter("efa_0", is_efa=True))
    assert [each.name for each in nccl_adapters(adapters, {"NCCL_IB_HCA": listed})] == used.split()


@pytest.mark.parametrize(
    ("kind", "speed", "megabits"),
    [
        ("device", "100000", 100_000),
        ("bonding", "50000", 50_000),
        ("device", "-1", None),
        ("device", "4294967295", None),
        ("device", "0", None),
        ("device", None, None),
        ("virtual", "10000", None),
    ],
)
def test_only_physical_and_bonded_interfaces_have_a_known_speed(
    tmp_path: Path, kind: str, speed: str | None, megabits: int | None
) -> None:
    (tmp_path / "eth0" / kind).mkdir(parents=True)
    if speed:
        write(tmp_path / "eth0" / "speed", speed)
    assert interface_megabits("eth0", tmp_path) == megabits
    assert interface_megabits("absent", tmp_path) is None
