"""The actor of a network check on a node: joins a group, sends or receives a bucket and compares it."""

import ipaddress
import os
import socket
import time
from dataclasses import dataclass

from rlhf_stack import sync
from rlhf_stack.accelerator import devices
from rlhf_stack.cluster import assigned_gpu
from rlhf_stack.config import env_vars
from rlhf_stack.diagnostics.network_adapters import interface_megabits, nccl_adapters, rdma_adapters
from rlhf_stack.diagnostics.network_check.model import CheckedNode, Interface
from rlhf_stack.lazy import torch
from rlhf_stack.sync.group import WeightGroup
from rlhf_stack.sync.membership import listen

REPEATS = 3  # of which the best counts: a mean would include other load


@dataclass(frozen=True)
class Outcome:
    """The result of one rank: its best ``seconds`` for ``bytes``; ``equal``: the data is correct."""

    connect_seconds: float
    seconds: float
    bytes: int
    equal: bool


class Probe:
    """An actor on one node; ``deadline`` in seconds for the rendezvous and for each transfer."""

    def __init__(self, address: str, backend: str, deadline: float) -> None:
        self._address, self._backend = address, backend
        self._listener: socket.socket | None = None
        os.environ[env_vars.SYNC_TIMEOUT] = str(deadline)  # of this process, which does nothing else
        os.environ |= {env_vars.SYNC_SPARSE: "off", env_vars.SYNC_SOURCES: "auto"}  # others need gloo
        if backend == "gloo":  # it sends from host memory, and Ray may hide the GPUs from this process
            os.environ[env_vars.ACCELERATOR] = "cpu"
        assigned_gpu.select()

    def describe(self) -> CheckedNode:
        """Describe this node, its interfaces and its RDMA."""
        used = os.environ.get(f"{self._backend.upper()}_SOCKET_IFNAME", "")
        rdma = max((each.megabits for each in nccl_adapters(rdma_adapters(), os.environ)), default=0)
        return CheckedNode(self._address, socket.gethostname(), interfaces(), used, rdma or None)

    def listen(self) -> int:
        """Listen at this node's address for the next group of which this process is rank 0; the port."""
        self._listener = listen(self._address)
        return int(self._listener.getsockname()[1])

    def transfer(self, host: str, port: int, rank: int, world: int, size: int) -> Outcome:
        """Join a group as ``rank``; rank 0, on ``host``, sends about ``size`` bytes in several dtypes."""
        start = time.monotonic()
        listener = None if rank else self._listener
        where = host, port, rank, world
        group = sync.create_group(*where, devices.current_device(), self._backend, listener)
        connected = time.monotonic() - start
        try:
            return Outcome(connected, *_measure(group, size))
        finally:
            group.close()


def _measure(group: WeightGroup, size: int) -> tuple[float, int, bool]:
    """Send about ``size`` bytes `REPEATS` times; the best seconds, the bytes, whether they are correct."""
    sent = torch.cat([tensor.view(torch.uint8) for tensor in bucket(size)]).to(group.device)
    taken = []
    with group.syncing():
        held = group.buffers.for_bucket(sent.numel(), 0)
        if group.rank == 0:
            held.copy_(sent)
        elif group.in_place:  # otherwise the buffer is that of rank 0
            held.zero_()
        for _ in range(REPEATS):
            _send(group, held[:1], "the first byte of the bucket")  # all ranks start together
            start = time.monotonic()
            _send(group, held, "the bucket")
            taken.append(time.monotonic() - start)
        equal = torch.equal(sent, held)
        _send(group, held[:1], "the last byte")  # no rank frees the buffer before all have compared it
    return min(taken), sent.numel(), equal


def _send(group: WeightGroup, part: "torch.Tensor", what: str) -> None:
    transfer = group.start([part], what)
    transfer.finish()
    if group.rank:
        transfer.release()
    devices.synchronize()


def bucket(size: int) -> "list[torch.Tensor]":
    """About ``size`` random bytes in the dtypes of weights, equal on every node."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    count = max(4, size // len(dtypes) // 4 * 4)
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype)
        for dtype in dtypes
    ]


def interfaces() -> tuple[Interface, ...]:
    """The interfaces of this machine that are up, with their IPv4 and global IPv6 addresses."""
    import psutil

    states = psutil.net_if_stats()
    found = []
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        for entry in addresses:
            network = interface_network(entry.family, entry.address, entry.netmask)
            if network and states[name].isup:
                found.append(Interface(name, entry.address, network, interface_megabits(name)))
    return tuple(found)


def interface_network(family: int, address: str, netmask: str | None) -> str:
    """The network of an address, such as 10.0.0.0/24; "" for loopback, link-local and other addresses."""
    if family not in (socket.AF_INET, socket.AF_INET6) or not netmask or "%" in address:
        return ""
    length = int(ipaddress.ip_address(netmask)).bit_count()
    network = ipaddress.ip_network(f"{address}/{length}", strict=False)
    return "" if network.is_loopback or network.is_link_local else str(network)
