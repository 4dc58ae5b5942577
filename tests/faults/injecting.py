"""How each fault is brought about on a node of a cluster, and how it is mended."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import docker.errors
from docker.models.containers import Container

from scripts.errors import UserError
from scripts.release.fault_cases import SYNC
from scripts.testing.cluster import Cluster
from tests.faults.runs import CHECKPOINTS
from tests.network import links, remote

SHARED_MEMORY = "/dev/shm"
MEGABITS = 4
SYNC_MEGABITS = 0.3  # of this link, on which the weights of the tiny model take some seconds
FILLED = "filled-by-the-test"
CGROUP = Path("/sys/fs/cgroup/memory/docker")
MEGABYTE = 1 << 20
SLACK = tuple(MEGABYTE * size for size in (32, 64, 128, 256, 512))
OVERFLOW = 64 * MEGABYTE
UNLIMITED = 1 << 40
KILL_SECONDS = 60.0
POLL_SECONDS = 0.1
REJOIN_SECONDS = 180.0
ATTEMPT_SECONDS = 10.0


@dataclass(frozen=True)
class Site:
    """Where a fault happens: ``node`` of ``cluster``, in ``phase``.

    ``ranks`` are the trainer's nodes, and ``process`` begins the name of what runs on ``node`` in this phase.
    """

    cluster: Cluster
    phase: str
    node: Container
    address: str
    ranks: Sequence[str]
    process: str

    @property
    def running(self) -> list[Container]:
        """The nodes that have not ended."""
        for container in self.cluster.containers:
            container.reload()
        return [container for container in self.cluster.containers if container.status == "running"]

    @property
    def others(self) -> list[tuple[Container, str]]:
        """All nodes but this one, with their addresses."""
        return [(node, address) for node, address in by_address(self.cluster) if address != self.address]

    def stretched(self) -> AbstractContextManager[None]:
        """The phase takes long enough to be hit: a sync of the tiny model ends within a tenth of a second."""
        return links.slow_towards(self.node, SYNC_MEGABITS) if self.phase == SYNC else nullcontext()


def by_address(cluster: Cluster) -> list[tuple[Container, str]]:
    """The nodes with their addresses."""
    addresses = {str(known["host"]): str(known["address"]) for known in cluster.addresses}
    return [(node, addresses[node.attrs["Config"]["Hostname"]]) for node in cluster.containers]


@dataclass(frozen=True)
class Fault:
    """What is done, what ends it, and which nodes an error may name for it."""

    inject: Callable[[Site], None]
    mend: Callable[[Site], None] = lambda _: None
    blamed: Callable[[Site], Sequence[str]] = lambda site: [site.address]


def kill_process(site: Site) -> None:
    """The trainer's rank while it trains, else the engine's process."""
    (pid,) = _processes(site)
    os.kill(pid, signal.SIGKILL)


def cut(site: Site) -> None:
    """Nothing of the node reaches another any more, nor the other way, as when a cable is pulled."""
    for other, address in site.others:
        links.block(site.node, address)
        links.block(other, site.address)


def join(site: Site) -> None:
    """End `cut`."""
    for node in site.running:
        links.unblock(node)


def slow_down(site: Site) -> None:
    """What every node sends."""
    for node in site.cluster.containers:
        links.slow_down(node, MEGABITS)


def speed_up(site: Site) -> None:
    """End `slow_down`."""
    for node in site.running:
        links.speed_up(node)


def fill(folder: str) -> Fault:
    """Write to ``folder`` of the node until nothing more fits."""
    path = f"{folder}/{FILLED}"

    def inject(site: Site) -> None:
        command = f"dd if=/dev/zero of={path} bs=64k 2>/dev/null; test -s {path}"
        site.cluster.output(site.node, ["sh", "-c", command])

    def mend(site: Site) -> None:
        for node in site.running:
            site.cluster.output(node, ["rm", "--force", path])

    return Fault(inject, mend)


def limit_memory(site: Site) -> None:
    """To what the node uses and as little more as the kernel takes; then something else fills that.

    Returns when the kernel or Ray has ended a process for it; a `UserError` if neither does.
    """
    before = _kills(site)
    slack = _limit(site)
    size = (slack + OVERFLOW) // MEGABYTE
    command = f"dd if=/dev/zero of={SHARED_MEMORY}/{FILLED} bs=1M count={size} 2>/dev/null"
    with contextlib.suppress(UserError):  # it may be what is ended, or the whole node
        site.cluster.output(site.node, ["sh", "-c", command])
    until = time.monotonic() + KILL_SECONDS
    while _processes(site) and _kills(site) == before:
        if time.monotonic() > until:
            raise UserError(f"nothing on {site.node.name} was ended for want of memory")
        time.sleep(POLL_SECONDS)


def _limit(site: Site) -> int:
    """Limit the memory of the node; the bytes that it may use more than it does."""
    for slack in SLACK:
        counted = (CGROUP / str(site.node.id) / "memory.stat").read_text(encoding="ascii").split()
        used = dict(zip(counted[::2], map(int, counted[1::2]), strict=True))
        limit = used["total_rss"] + used["total_shmem"] + slack
        try:
            site.node.update(mem_limit=limit, memswap_limit=limit)
            return slack
        except docker.errors.APIError:
            continue  # the kernel cannot reclaim that much
    raise UserError(f"the memory of {site.node.name} cannot be limited to what it uses")


def _kills(site: Site) -> str:
    """How often the kernel has ended a process of the node for want of memory; "" if the node has ended."""
    try:
        control = (CGROUP / str(site.node.id) / "memory.oom_control").read_text(encoding="ascii")
    except FileNotFoundError:
        return ""
    return control.split("oom_kill ")[-1].strip()


def _processes(site: Site) -> list[int]:
    """Of the run, on the node, in this phase: a rank of the trainer or the engine; none if the node ended."""
    try:
        table = site.node.top(ps_args="-eo pid,args")["Processes"] or []
    except docker.errors.APIError:  # it does not run
        return []
    return [int(pid) for pid, command in table if command.startswith(site.process)]


def unlimit_memory(site: Site) -> None:
    """End `limit_memory`."""
    site.node.update(mem_limit=UNLIMITED, memswap_limit=UNLIMITED)
    fill(SHARED_MEMORY).mend(site)


FAULTS = {
    "node killed": Fault(lambda site: site.node.kill()),
    "process killed": Fault(kill_process),
    "link cut": Fault(cut, join),
    "node paused": Fault(lambda site: site.node.pause(), lambda site: site.node.unpause()),
    "disk of the checkpoints full": replace(fill(CHECKPOINTS), blamed=lambda site: site.ranks),
    "head restarted": Fault(
        lambda site: site.cluster.head.restart(timeout=0), blamed=lambda _: [remote.SERVER]
    ),
    f"link slowed to {MEGABITS} Mbit/s": Fault(slow_down, speed_up),
    "shared memory full": fill(SHARED_MEMORY),
    "memory limit hit": Fault(limit_memory, unlimit_memory),
}


def rejoin(cluster: Cluster) -> None:
    """Start the nodes that have ended, until Ray knows all of them again; a `UserError` after a while.

    Ray ends a node that it took for dead as soon as the node is heard of again.
    """
    deadline = time.monotonic() + REJOIN_SECONDS
    while True:
        for container in cluster.containers:
            container.reload()
            if container.status == "exited":
                container.start()
        try:
            cluster.wait_for_nodes(ATTEMPT_SECONDS)
            return
        except UserError:
            if time.monotonic() > deadline:
                raise
