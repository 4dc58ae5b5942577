"""The ``ray start`` for a machine: a pure function of what was asked and of what is there."""

import re
from dataclasses import dataclass

from rlhf_stack.cli import option_types
from rlhf_stack.cluster.host import SHARED_MEMORY, Here, is_public
from rlhf_stack.errors import UserError

LEAST = 78_643_200  # bytes of an object store: Ray's own limit
OF_MEMORY, OF_SHARED = 0.3, 0.9  # what of the memory Ray takes by itself, and of /dev/shm what it leaves
MOST = 200_000_000_000  # bytes: Ray's own limit where nobody asks for more
PORT = 6379
ADDRESS = re.compile(r"(?:[^\s:\[\]]+|\[[0-9a-fA-F:.]+\])(?::(?P<port>\d+))?")  # [...]: of version 6
LOOPBACK = "127.0.0.1"
GIB = 1 << 30


@dataclass(frozen=True)
class Asked:
    """``join`` is the head's address, None on the head itself; sizes are in bytes; None: as is right here."""

    join: str | None
    gpus: int | None = None
    cpus: int | None = None
    object_store: int | None = None
    address: str | None = None
    port: int = PORT
    dashboard: str = LOOPBACK
    block: bool = False


def command(asked: Asked, here: Here, token: bool) -> list[str]:
    """``ray start`` with its arguments. ``token`` is whether the cluster asks for one.

    `UserError` says what of ``asked`` cannot be, and what to do.
    """
    address = asked.address or here.address
    _refuse_strangers(asked, address, token)
    found = ["ray", "start", "--node-ip-address", address]
    if asked.join is None:
        found += ["--head", "--port", str(asked.port), "--dashboard-host", asked.dashboard]
    else:
        found += ["--address", with_port(asked.join)]
    found += ["--num-gpus", str(gpus(asked.gpus, here))]
    found += ["--object-store-memory", str(object_store(asked.object_store, here))]
    if asked.cpus is not None:
        found += ["--num-cpus", str(asked.cpus)]
    return [*found, *(["--block"] if asked.block else [])]


def with_port(address: str) -> str:
    """An address of a head, with Ray's own port if it has none; `UserError` if it is no HOST[:PORT]."""
    found = ADDRESS.fullmatch(address)
    if not found or not 0 < int(found["port"] or PORT) <= option_types.LAST_PORT:
        raise UserError(f"{address!r}: expected the head's HOST or HOST:PORT, such as 10.0.0.1")
    return address if found["port"] else f"{address}:{PORT}"


def gpus(asked: int | None, here: Here) -> int:
    """GPUs to declare: those that processes see, and not another number than was asked for."""
    if here.seen is None:  # no GPU here: what is declared are places for processes
        return asked or 0
    if asked is not None and asked != len(here.seen):
        raise UserError(
            f"--num-gpus {asked}, and a process here sees {len(here.seen)} GPUs "
            f"({', '.join(here.seen) or 'none'}): restrict them by CUDA_VISIBLE_DEVICES, before anything "
            "starts, and leave --num-gpus out"
        )
    return len(here.seen)


def object_store(asked: int | None, here: Here) -> int:
    """Bytes of the object store, which is in ``/dev/shm`` and must not be larger."""
    room = int(here.shared * OF_SHARED)
    if asked is not None and asked > here.shared:
        raise UserError(
            f"--object-store-memory {asked} is more than the {here.shared} bytes that are free in "
            f"{SHARED_MEMORY}: ask for at most {room}, or start the container with a larger --shm-size"
        )
    if max(room, asked or 0) < LEAST:
        raise UserError(
            f"{SHARED_MEMORY} has {here.shared / GIB:.2f} GiB free and Ray's object store needs "
            f"{LEAST / GIB:.2f}: start the container with --shm-size 2g or more (in Kubernetes: an emptyDir "
            f"of medium Memory on {SHARED_MEMORY})"
        )
    return asked if asked is not None else max(LEAST, min(room, int(here.memory * OF_MEMORY), MOST))


def _refuse_strangers(asked: Asked, address: str, token: bool) -> None:
    """Whoever reaches a Ray cluster without a token runs what he likes on it."""
    if token:
        return
    for name, used in (("--node-ip-address", address), ("--dashboard-host", asked.dashboard)):
        if is_public(used):
            raise UserError(
                f"{name} {used} is a public address, and this cluster would have no token: whoever reaches "
                "it could run anything on it. Give a private address, or use a Ray that has tokens"
            )
