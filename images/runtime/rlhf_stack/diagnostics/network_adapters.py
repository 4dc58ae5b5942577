"""Reads from sysfs the speed of network interfaces, and the RDMA adapters of this node."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

NET, INFINIBAND, VERBS = (Path("/sys/class", name) for name in ("net", "infiniband", "infiniband_verbs"))
DEVICES = Path("/dev/infiniband")
AMAZON = "0x1d0f"  # PCI vendor: its RDMA adapters are EFA
RATE = re.compile(r"([\d.]+) Gb/sec")
UNKNOWN = 1 << 31  # some drivers report -1 as an unsigned number


@dataclass(frozen=True)
class RdmaAdapter:
    """An RDMA adapter of the node; ``megabits`` per second of its fastest active port, 0 if none is active.

    ``accessible``: its device file is in this container, and this user may read and write it.
    """

    name: str
    megabits: int = 0
    active: bool = True
    accessible: bool = True
    is_efa: bool = False


def rdma_adapters(
    infiniband: Path = INFINIBAND, verbs: Path = VERBS, devices: Path = DEVICES
) -> tuple[RdmaAdapter, ...]:
    """The RDMA adapters of this node by name, also those whose device file is not in this container."""
    files = {_text(entry / "ibdev"): devices / entry.name for entry in _entries(verbs, "uverbs*")}
    return tuple(_adapter(entry, files.get(entry.name)) for entry in _entries(infiniband, "*"))


def nccl_adapters(adapters: Iterable[RdmaAdapter], variables: Mapping[str, str]) -> tuple[RdmaAdapter, ...]:
    """The active adapters that NCCL uses with NCCL_NET, NCCL_IB_DISABLE and NCCL_IB_HCA in ``variables``."""
    if variables.get("NCCL_NET", "").lower() == "socket":
        return ()
    efa_only = variables.get("NCCL_IB_DISABLE", "0") not in ("", "0")
    listed = variables.get("NCCL_IB_HCA", "")
    return tuple(
        each
        for each in adapters
        if each.active and (each.is_efa or (not efa_only and _is_selected(each.name, listed)))
    )


def _is_selected(name: str, listed: str) -> bool:
    """Whether ``listed`` selects an adapter, as NCCL reads NCCL_IB_HCA: prefixes by commas, or after = names.

    After ^ it has the adapters that are not used. A port (mlx5_0:1) counts as its adapter, which has one.
    """
    excludes = listed.startswith("^")
    listed = listed.removeprefix("^")
    names = tuple(each.partition(":")[0] for each in listed.removeprefix("=").split(",") if each)
    if not names:
        return True
    return (name in names if listed.startswith("=") else name.startswith(names)) != excludes


def rate_megabits(text: str) -> int:
    """The speed in a port's ``rate`` such as "400 Gb/sec (4X NDR)", in Mbit/s; 0 if it has none."""
    found = RATE.match(text)
    return int(float(found[1]) * 1000) if found else 0


def interface_megabits(name: str, net: Path = NET) -> int | None:
    """The speed of a physical or bonded interface in Mbit/s, None if unknown.

    A virtual interface has no known speed: a veth reports 10 Gbit/s on any machine.
    """
    folder = net / name
    if not (folder / "device").exists() and not (folder / "bonding").exists():
        return None
    text = _text(folder / "speed")
    return int(text) if text.isdecimal() and 0 < int(text) < UNKNOWN else None


def _adapter(folder: Path, file: Path | None) -> RdmaAdapter:
    active = [port for port in _entries(folder / "ports", "*") if "ACTIVE" in _text(port / "state")]
    return RdmaAdapter(
        folder.name,
        max((rate_megabits(_text(port / "rate")) for port in active), default=0),
        bool(active),
        file is not None and os.access(file, os.R_OK | os.W_OK),
        folder.name.startswith("efa") or _text(folder / "device" / "vendor") == AMAZON,
    )


def _entries(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern)) if folder.is_dir() else []


def _text(file: Path) -> str:
    """The content of a file without white space at its ends; "" if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
