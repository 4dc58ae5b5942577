"""The ``ray start`` command of a machine: a pure function of the requested options and the host."""

import contextlib
import ipaddress
import re
from dataclasses import dataclass

from rlhf_stack.cluster.host import SHARED_MEMORY, Host, is_ipv6, is_public
from rlhf_stack.cluster.ports import LAST_PORT
from rlhf_stack.errors import UserError
from rlhf_stack.inputs.text import shortened

MIN_OBJECT_STORE = 78_643_200  # bytes: Ray's own limit
MAX_OBJECT_STORE = 200_000_000_000  # bytes: Ray's own limit for a default size
MEMORY_FRACTION, SHM_FRACTION = 0.3, 0.9  # Ray's own default of the memory; the usable part of /dev/shm
PORT = 6379
LABEL = "[A-Za-z0-9](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9])?"
HOST_NAME = re.compile(rf"{LABEL}(?:\.{LABEL}){{0,40}}\.?")
ADDRESS = re.compile(
    rf"(?:{HOST_NAME.pattern}|\[[0-9a-fA-F:.]+\])(?::(?P<port>[0-9]{{1,5}}))?"
)  # [...] is IPv6
LOOPBACK = "127.0.0.1"
GIB = 1 << 30


@dataclass(frozen=True)
class StartOptions:
    """Requested options, sizes in bytes; ``join`` is the head's address, None on the head itself.

    None elsewhere selects the default for this machine.
    """

    join: str | None
    gpus: int | None = None
    cpus: int | None = None
    object_store: int | None = None
    address: str | None = None
    port: int = PORT
    dashboard: str = LOOPBACK
    block: bool = False


def ray_start_command(options: StartOptions, host: Host, token: bool) -> list[str]:
    """Return ``ray start`` with its arguments; ``token``: the cluster requires one.

    Raises `UserError` if an option is impossible on ``host``, with the remedy.
    """
    address = host.address if options.address is None else _node_address("--node-ip-address", options.address)
    _node_address("--dashboard-host", options.dashboard, any_interface=True)
    _refuse_public_address(options, address, token)
    command = ["ray", "start", "--node-ip-address", address]
    if options.join is None:
        command += ["--head", "--port", str(options.port), "--dashboard-host", options.dashboard]
        # Otherwise Ray starts without a job server if the port is taken, and its owner takes our jobs.
        command += ["--include-dashboard", "true"]
    else:
        command += ["--address", with_port(options.join)]
    command += ["--num-gpus", str(gpus_to_declare(options.gpus, host))]
    command += ["--object-store-memory", str(object_store_bytes(options.object_store, host))]
    if options.cpus is not None:
        command += ["--num-cpus", str(options.cpus)]
    return [*command, *(["--block"] if options.block else [])]


def with_port(address: str) -> str:
    """Return the head's ``address`` with Ray's default port if it has none; `UserError` if malformed."""
    if is_ipv6(address):
        host, _, last = address.rpartition(":")
        if is_ipv6(host) and last.isdecimal():
            raise UserError(f"{address!r}: expected [{host}]:{last} with a port, or [{address}] without")
        return f"[{_node_address('address', address)}]:{PORT}"
    found = ADDRESS.fullmatch(address)
    host = address[: found.start("port") - 1] if found and found["port"] else address
    is_bad = not is_ipv6(host.strip("[]")) if host.startswith("[") else not _names_a_host(host)
    if not found or is_bad or not 0 < int(found["port"] or PORT) <= LAST_PORT:
        raise UserError(
            f"{shortened(address, 80)!r}: expected the head's HOST or HOST:PORT, such as 10.0.0.1 or "
            "[fd00::1]:6379"
        )
    with contextlib.suppress(ValueError):
        _require_reachable(f"address {host!r}", ipaddress.ip_address(host.strip("[]")))
    return address if found["port"] else f"{address}:{PORT}"


def _node_address(name: str, address: str, any_interface: bool = False) -> str:
    """Return ``address``; `UserError` unless it is an IP address or a host name that others can reach."""
    shown = f"{name} {shortened(address, 80)!r}"
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        if not _names_a_host(address):
            raise UserError(f"{shown}: expected an IP address or a host name, such as 10.0.0.1") from None
        return address
    _require_reachable(shown, parsed, any_interface)
    return address


def _names_a_host(text: str) -> bool:
    """Whether ``text`` is an IPv4 address or a host name, which digits and dots alone, 999.1.1.1, are not."""
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return bool(HOST_NAME.fullmatch(text) and re.search("[A-Za-z]", text))
    return True


def _require_reachable(
    shown: str, parsed: ipaddress.IPv4Address | ipaddress.IPv6Address, any_interface: bool = False
) -> None:
    """Raise `UserError` for an address that no other machine can connect to."""
    if parsed.is_multicast or (parsed.is_unspecified and not any_interface):
        raise UserError(f"{shown}: no machine has this address; expected one such as 10.0.0.1")
    if not isinstance(parsed, ipaddress.IPv6Address):
        return
    kinds = {
        "an address with a zone": parsed.scope_id,
        "an IPv4 address in the form of IPv6": parsed.ipv4_mapped,
        "a link-local address, of a zone": parsed.is_link_local,
    }
    if kind := next((kind for kind, applies in kinds.items() if applies), ""):
        raise UserError(
            f"{shown}: {kind}, which Ray does not support; expected one such as 10.0.0.1 or fd00::1"
        )


def gpus_to_declare(requested: int | None, host: Host) -> int:
    """Return the number of GPUs to declare: those that processes see; `UserError` if another is requested."""
    if host.visible_gpus is None:  # without GPUs the number counts slots for processes
        return requested or 0
    visible = len(host.visible_gpus)
    if requested is not None and requested != visible:
        raise UserError(
            f"--num-gpus {requested}, but a process on this machine sees {visible} GPUs "
            f"({', '.join(host.visible_gpus) or 'none'}): restrict them by CUDA_VISIBLE_DEVICES, before "
            "anything starts, and leave --num-gpus out"
        )
    return visible


def object_store_bytes(requested: int | None, host: Host) -> int:
    """Return the size of the object store, which lives in ``/dev/shm`` and must fit there."""
    room = int(host.free_shm * SHM_FRACTION)
    if requested is not None and requested > host.free_shm:
        raise UserError(
            f"--object-store-memory {requested} is more than the {host.free_shm} bytes that are free in "
            f"{SHARED_MEMORY}: request at most {room}, or start the container with a larger --shm-size"
        )
    if requested is not None and requested < MIN_OBJECT_STORE:
        raise UserError(f"--object-store-memory {requested}: Ray needs {MIN_OBJECT_STORE} bytes or more")
    if max(room, requested or 0) < MIN_OBJECT_STORE:
        raise UserError(
            f"{SHARED_MEMORY} has {host.free_shm / GIB:.2f} GiB free and Ray's object store needs "
            f"{MIN_OBJECT_STORE / GIB:.2f}: start the container with --shm-size 2g or more (in Kubernetes: "
            f"an emptyDir of medium Memory on {SHARED_MEMORY})"
        )
    default = max(MIN_OBJECT_STORE, min(room, int(host.memory * MEMORY_FRACTION), MAX_OBJECT_STORE))
    return requested if requested is not None else default


def _refuse_public_address(options: StartOptions, address: str, token: bool) -> None:
    """Raise `UserError` for a public address without a token: anyone who reaches the cluster can run code."""
    if token:
        return
    for name, used in (("--node-ip-address", address), ("--dashboard-host", options.dashboard)):
        if is_public(used):
            raise UserError(
                f"{name} {used} is a public address, and this cluster would have no token: anyone who "
                "reaches it could run anything on it. Give a private address, or use a Ray that has tokens"
            )
