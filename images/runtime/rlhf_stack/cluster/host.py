"""What this machine has for a Ray node: GPUs, memory, shared memory, an address."""

import contextlib
import ipaddress
import os
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf_stack.accelerator import rocm, visible_devices
from rlhf_stack.config import env_vars
from rlhf_stack.errors import UserError

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
NVIDIA = Path("/proc/driver/nvidia/gpus")
LIMITS = (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory.max"))
ELSEWHERE = (
    "192.0.2.1"  # an address for documentation, by which the kernel tells the way out: nothing is sent
)

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Here:
    """``seen`` are the GPUs that a process sees under the variables in force, or None without a driver.

    ``shared`` is what is free of ``/dev/shm`` and ``memory`` what this machine or container has, in bytes.
    """

    seen: tuple[str, ...] | None
    memory: int
    shared: int
    address: str


def look(environment: Mapping[str, str]) -> Here:
    """This machine, under the variables in ``environment``."""
    return Here(_seen(environment), _memory(), shutil.disk_usage(SHARED_MEMORY).free, own_address())


def is_public(address: str) -> bool:
    """Whether an address can be reached from the internet; a name is taken for one that cannot."""
    try:
        return ipaddress.ip_address(address).is_global
    except ValueError:
        return False


def wait_for(address: str, seconds: float) -> None:
    """Until something listens at ``address``, HOST:PORT; `UserError` after ``seconds``."""
    host, _, port = address.rpartition(":")
    reached = (host.strip("[]"), int(port))
    deadline = time.monotonic() + seconds
    while True:
        try:
            with socket.create_connection(reached, max(0.1, deadline - time.monotonic())):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(f"no head answers at {address} after {seconds:g} s: {error}") from None
        time.sleep(POLL_SECONDS)


def own_address() -> str:
    """The address by which this machine reaches others, or that of the machine itself without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((ELSEWHERE, 9))
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def _seen(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """The GPUs under the visible-devices variables; None where there is no GPU to be used."""
    if env_vars.accelerator() == "cpu":
        return None
    kind: visible_devices.Kind = "rocm" if rocm.is_here() else "cuda"
    count = rocm.count() if kind == "rocm" else sum(1 for _ in NVIDIA.glob("*"))
    return tuple(visible_devices.seen(environment, kind, count)) if count else None


def _memory() -> int:
    """The smaller of the machine's memory and the container's limit."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for limit in LIMITS:
        with contextlib.suppress(OSError, ValueError):
            found.append(int(limit.read_text(encoding="ascii")))
    return min(found)
