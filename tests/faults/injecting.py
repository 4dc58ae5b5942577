"""How each fault is brought about on a node of a cluster, and how it is mended."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import docker.errors
from docker.models.containers import Container

from scripts.cluster import Cluster
from scripts.faults import TRAINING
from scripts.problem import Problem
from tests.network import links

CHECKPOINTS = "/checkpoints"
MEGABITS = 4
FILLED = "filled-by-the-test"
ENGINE, TRAINER = "VLLM::EngineCore", "ray::PolicyModelActor"
CGROUP = Path("/sys/fs/cgroup/memory/docker")
MEGABYTE = 1 << 20
SLACK = tuple(MEGABYTE * size for size in (32, 64, 128, 256, 512))
UNLIMITED = 1 << 40
REJOIN_SECONDS = 180.0
ATTEMPT_SECONDS = 10.0


@dataclass(frozen=True)
class Site:
    """Where a fault happens: ``node`` of ``cluster``, in ``phase``."""

    cluster: Cluster
    phase: str
    node: Container
    address: str

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


def by_address(cluster: Cluster) -> list[tuple[Container, str]]:
    """The nodes with their addresses."""
    addresses = {str(known["host"]): str(known["address"]) for known in cluster.addresses}
    return [(node, addresses[node.attrs["Config"]["Hostname"]]) for node in cluster.containers]


@dataclass(frozen=True)
class Fault:
    """What is done, and what ends it."""

    inject: Callable[[Site], None]
    mend: Callable[[Site], None] = lambda _: None


def kill_process(site: Site) -> None:
    """The trainer's rank while it trains, else the engine's process."""
    name = TRAINER if site.phase == TRAINING else ENGINE
    table = site.node.top(ps_args="-eo pid,args")["Processes"]
    (pid,) = (int(pid) for pid, command in table if command.startswith(name))
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
    """To what the node uses, which grows meanwhile, and as little more as the kernel takes."""
    for slack in SLACK:
        counted = (CGROUP / str(site.node.id) / "memory.stat").read_text(encoding="ascii").split()
        used = dict(zip(counted[::2], map(int, counted[1::2]), strict=True))
        limit = used["total_rss"] + used["total_shmem"] + slack
        try:
            site.node.update(mem_limit=limit, memswap_limit=limit)
            return
        except docker.errors.APIError:
            continue  # the kernel cannot reclaim that much
    raise Problem(f"the memory of {site.node.name} cannot be limited to what it uses")


def unlimit_memory(site: Site) -> None:
    """End `limit_memory`."""
    site.node.update(mem_limit=UNLIMITED, memswap_limit=UNLIMITED)


FAULTS = {
    "node killed": Fault(lambda site: site.node.kill()),
    "process killed": Fault(kill_process),
    "link cut": Fault(cut, join),
    "node paused": Fault(lambda site: site.node.pause(), lambda site: site.node.unpause()),
    "disk of the checkpoints full": fill(CHECKPOINTS),
    "head restarted": Fault(lambda site: site.cluster.head.restart(timeout=0)),
    f"link slowed to {MEGABITS} Mbit/s": Fault(slow_down, speed_up),
    "shared memory full": fill("/dev/shm"),
    "memory limit hit": Fault(limit_memory, unlimit_memory),
}


def rejoin(cluster: Cluster) -> None:
    """Start the nodes that have ended, until Ray knows all of them again; a `Problem` after a while.

    Ray ends a node that it took for dead as soon as the node is heard of again.
    """
    deadline = time.monotonic() + REJOIN_SECONDS
    while True:
        for container in cluster.containers:
            container.reload()
            if container.status == "exited":
                container.start()
        try:
            cluster.wait(ATTEMPT_SECONDS)
            return
        except Problem:
            if time.monotonic() > deadline:
                raise
