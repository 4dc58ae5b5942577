"""What a rehearsal runs on each node: join a group, take part in one send, look at what arrived."""

import ipaddress
import os
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_stack import sync
from rlhf_stack.accelerator import devices
from rlhf_stack.config import env_vars
from rlhf_stack.diagnostics.network_check.model import Interface, Node
from rlhf_stack.sync.group import WeightGroup

if TYPE_CHECKING:
    import torch

REPEATS = 3  # the best of which shows what a link can do, where a mean shows what else ran


@dataclass(frozen=True)
class Outcome:
    """What one rank saw: its best ``seconds`` for ``bytes``, and whether it got what was sent."""

    connect_seconds: float
    seconds: float
    bytes: int
    equal: bool


class Probe:
    """An actor on one node. ``deadline`` in seconds holds for the rendezvous and for each transfer."""

    def __init__(self, address: str, backend: str, deadline: float) -> None:
        self._address, self._backend = address, backend
        os.environ[env_vars.SYNC_TIMEOUT] = str(deadline)  # of this process, which does nothing else

    def describe(self) -> Node:
        """This node, and its interfaces that are up."""
        used = os.environ.get(f"{self._backend.upper()}_SOCKET_IFNAME", "")
        return Node(self._address, socket.gethostname(), interfaces(), used)

    def free_port(self) -> int:
        """A port of this node's address on which nobody listens."""
        with socket.socket() as listener:
            listener.bind((self._address, 0))
            return int(listener.getsockname()[1])

    def transfer(self, host: str, port: int, rank: int, world: int, size: int) -> Outcome:
        """Be rank ``rank`` of a group in which rank 0, on ``host``, sends ``size`` bytes in every dtype."""
        import torch

        start = time.monotonic()
        group = sync.create_group(host, port, rank, world, devices.current_device(), self._backend)
        connected = time.monotonic() - start
        sent = torch.cat([tensor.view(torch.uint8) for tensor in bucket(size)]).to(group.device)
        held = group.buffers.first(sent.numel(), 0)
        if rank == 0:
            held.copy_(sent)
        elif group.in_place:  # else these are rank 0's
            held.zero_()
        taken = []
        for _ in range(REPEATS):
            with group.syncing():
                _send(group, held[:1], "the first byte of the bucket")  # all begin together
                start = time.monotonic()
                _send(group, held, "the bucket")
                taken.append(time.monotonic() - start)
        equal = torch.equal(sent, held)
        return Outcome(connected, min(taken), sent.numel(), equal)


def _send(group: WeightGroup, part: "torch.Tensor", what: str) -> None:
    transfer = group.start([part], what)
    transfer.finish()
    if group.rank:
        transfer.release()
    devices.synchronize()


def bucket(size: int) -> "list[torch.Tensor]":
    """About ``size`` random bytes in the dtypes in which weights are sent, the same on every node."""
    import torch

    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    count = max(4, size // len(dtypes) // 4 * 4)
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype)
        for dtype in dtypes
    ]


def interfaces() -> tuple[Interface, ...]:
    """This machine's interfaces that are up and have an IPv4 address, but for loopback."""
    import psutil

    states = psutil.net_if_stats()
    found = []
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        for entry in addresses:
            if entry.family is not socket.AF_INET or not entry.netmask or not states[name].isup:
                continue
            network = ipaddress.ip_network(f"{entry.address}/{entry.netmask}", strict=False)
            if not network.is_loopback:
                speed = states[name].speed or None
                found.append(Interface(name, entry.address, str(network), speed))
    return tuple(found)
