"""What this machine offers a Ray node: GPUs, memory, shared memory and an address."""

import contextlib
import errno
import ipaddress
import os
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf_stack.accelerator import nvidia, rocm, visible_devices
from rlhf_stack.config import env_vars
from rlhf_stack.errors import UserError
from rlhf_stack.inputs.text import shortened

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory.max"))
CGROUP_USES = (Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"), Path("/sys/fs/cgroup/memory.current"))
CGROUP_CACHES = (  # in which files, and under which names, is the file cache that the kernel frees on demand
    (Path("/sys/fs/cgroup/memory/memory.stat"), "total_inactive_file"),
    (Path("/sys/fs/cgroup/memory.stat"), "inactive_file"),
)
# Addresses for documentation: the kernel selects the outgoing interface for them, and nothing is sent.
PROBE_ADDRESSES = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Host:
    """A machine, sizes in bytes.

    ``visible_gpus`` are the GPUs that a process sees under the current variables, None without a driver.
    ``memory`` is that of the machine or container, ``free_shm`` the free part of ``/dev/shm``.
    """

    visible_gpus: tuple[str, ...] | None
    memory: int
    free_shm: int
    address: str


def inspect_host(environment: Mapping[str, str], head: str | None = None) -> Host:
    """Inspect this machine under the variables in ``environment``; its address is for the host ``head``."""
    free_shm = shutil.disk_usage(SHARED_MEMORY).free
    return Host(_visible_gpus(environment), _memory(), free_shm, own_address(head))


def available_memory() -> int:
    """Return the bytes of memory that are left now, with the inactive part of the file cache."""
    with Path("/proc/meminfo").open(encoding="ascii") as lines:
        sizes = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    for limit, use, cache in zip(CGROUP_LIMITS, CGROUP_USES, CGROUP_CACHES, strict=True):
        with contextlib.suppress(OSError, ValueError):
            used = max(0, int(use.read_text("ascii")) - _statistic(*cache))
            sizes.append(max(0, int(limit.read_text("ascii")) - used))
    return min(sizes)


def _statistic(file: Path, name: str) -> int:
    """A value of a cgroup's ``memory.stat``; 0 without it."""
    with contextlib.suppress(OSError, ValueError):
        return int(dict(line.split() for line in file.read_text("ascii").splitlines()).get(name, 0))
    return 0


def is_public(address: str) -> bool:
    """Report whether ``address`` is routed on the internet; a host name counts as one that is not."""
    try:
        return ipaddress.ip_address(address).is_global
    except ValueError:
        return False


def is_ipv6(address: str) -> bool:
    """Report whether ``address`` is an IPv6 address, without brackets and port."""
    try:
        return ipaddress.ip_address(address).version == 6
    except ValueError:
        return False


def free_port(address: str) -> int:
    """Return a TCP port of this machine's ``address`` that is free now."""
    with socket.socket(socket.AF_INET6 if is_ipv6(address) else socket.AF_INET) as listener:
        listener.bind((address, 0))
        return int(listener.getsockname()[1])


def is_taken(address: str, port: int) -> bool:
    """Report whether a server listens on ``port`` of this machine's ``address``; "" stands for all of IPv4.

    False if the address cannot be used for another reason.
    """
    with socket.socket(socket.AF_INET6 if is_ipv6(address) else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Ray, which restarts on its port
        try:
            probe.bind((address, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def require_free_port(address: str, port: int) -> None:
    """Raise `UserError` if a server listens on ``port`` of this machine's ``address``: another Ray's.

    An address that cannot be used for another reason is left to Ray, which reports it.
    """
    if is_taken(address, port):
        raise UserError(
            f"port {port} of {address}, for Ray's dashboard and job server, is in use, probably by another "
            "Ray: end that one first (ray stop), or start this head on another machine or in a container "
            "with a network of its own"
        )


def endpoint(address: str, port: int) -> str:
    """Return ``address:port``, with an IPv6 address in brackets."""
    return f"[{address}]:{port}" if is_ipv6(address) else f"{address}:{port}"


def wait_for_port(address: str, seconds: float) -> None:
    """Wait until a server listens at ``address`` (HOST:PORT); `UserError` after ``seconds``."""
    host, _, port = address.rpartition(":")
    target = (host.strip("[]"), int(port))
    deadline = time.monotonic() + seconds
    while True:
        try:
            with socket.create_connection(target, max(0.1, deadline - time.monotonic())):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(f"no head answers at {address} after {seconds:g} s: {error}") from None
        time.sleep(POLL_SECONDS)


def wait_for_name(host: str, seconds: float) -> None:
    """Wait until the name of a head has an address, as when it starts; `UserError` after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not _addresses(host):
        if time.monotonic() >= deadline:
            waited = f" after {seconds:g} s" if seconds else ""
            raise UserError(f"the head's name {shortened(host, 80)!r} has no address{waited}")
        time.sleep(POLL_SECONDS)


def own_address(head: str | None = None) -> str:
    """Return this machine's address on the route to ``head``, by default on its default route.

    Without a route it is an address of the machine's host name; without any it is 127.0.0.1, or a `UserError`
    if ``head`` is another machine.
    """
    targets = _addresses(head) if head else list(PROBE_ADDRESSES.items())
    for family, target in targets:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
    named = [address for _, address in _addresses(socket.gethostname())]
    found = next((one for one in named if not ipaddress.ip_address(one).is_loopback), None)
    if found is None and head:
        raise UserError(f"no address of this machine leads to {shortened(head, 80)}: give --node-ip-address")
    return found or "127.0.0.1"


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """The addresses of a host, without a zone; none if its name is unknown."""
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_DGRAM)
        return [(family, str(address[0])) for family, _, _, _, address in found if "%" not in str(address[0])]
    return []


def _visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    if env_vars.accelerator() == "cpu":
        return None
    kind: visible_devices.Kind = "rocm" if rocm.is_rocm() else "cuda"
    count = rocm.count() if kind == "rocm" else nvidia.count()
    return tuple(visible_devices.visible_gpus(environment, kind, count)) if count else None


def _memory() -> int:
    """Return the smaller of the machine's memory and the container's limit."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for limit in CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):
            sizes.append(int(limit.read_text(encoding="ascii")))
    return min(sizes)
