"""Injection of each fault on a node of a cluster, and its removal."""

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
from scripts.testing.cluster import Cluster, repeat_while
from tests.faults.runs import CHECKPOINTS
from tests.network import links, remote

SHARED_MEMORY = "/dev/shm"
MEGABITS = 4
SYNC_MEGABITS = 0.3  # at which the weights of the tiny model take some seconds
FILLED = "filled-by-the-test"
CGROUPS, PROC = Path("/sys/fs/cgroup"), Path("/proc")
# Names in memory.stat of what cannot be taken from processes; version 2 of cgroups counts the kernel's too.
UNRECLAIMABLE = {
    "memory.oom_control": ("total_rss", "total_shmem"),
    "memory.events": ("anon", "shmem", "kernel_stack", "pagetables", "slab_unreclaimable"),
}
MEGABYTE = 1 << 20
SLACK = tuple(MEGABYTE * size for size in (32, 64, 128, 256, 512))
OVERFLOW = 64 * MEGABYTE
UNLIMITED = 1 << 40
KILL_SECONDS = 60.0
PAUSE_SECONDS = 60.0
POLL_SECONDS = 0.1
REJOIN_SECONDS = 180.0
ATTEMPT_SECONDS = 10.0


@dataclass(frozen=True)
class Site:
    """The place of a fault: ``node`` of ``cluster``, in ``phase``.

    ``ranks`` are the addresses of the trainer's nodes; ``process`` is the prefix of the command line of the
    process on ``node`` in this phase.
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
        """All other nodes, with their addresses."""
        return [(node, address) for node, address in by_address(self.cluster) if address != self.address]

    def prolonged(self) -> AbstractContextManager[None]:
        """Make the phase last long enough to be hit: a sync of the tiny model takes less than 0.1 s."""
        return links.slow_towards(self.node, SYNC_MEGABITS) if self.phase == SYNC else nullcontext()


def by_address(cluster: Cluster) -> list[tuple[Container, str]]:
    """Return the nodes with their addresses."""
    addresses = {str(known["host"]): str(known["address"]) for known in cluster.addresses}
    return [(node, addresses[node.attrs["Config"]["Hostname"]]) for node in cluster.containers]


@dataclass(frozen=True)
class Fault:
    """A fault: its injection, its removal, and the addresses of which an error should name one.

    One that does not last needs no removal, also not the restart of a node.
    """

    inject: Callable[[Site], None]
    remove: Callable[[Site], None] = lambda _: None
    expected_nodes: Callable[[Site], Sequence[str]] = lambda site: [site.address]
    lasts: bool = True


def kill_process(site: Site) -> None:
    """Kill the trainer's rank in the training phase, otherwise the engine's process."""
    (pid,) = processes(site.node, site.process)
    os.kill(pid, signal.SIGKILL)


def cut_link(site: Site) -> None:
    """Block all traffic between the node and the others, as when a cable is pulled."""
    for other, address in site.others:
        links.block(site.node, address)
        links.block(other, site.address)


def restore_link(site: Site) -> None:
    """Undo `cut_link`."""
    for node in site.running:
        links.unblock(node)


def pause(node: Container) -> None:
    """Pause ``node``; the freezer of cgroups refuses while a process starts or ends, and is tried again."""
    repeat_while("unable to freeze", node.pause, PAUSE_SECONDS)


def slow_down(site: Site) -> None:
    """Limit what every node sends to `MEGABITS`."""
    for node in site.cluster.containers:
        links.slow_down(node, MEGABITS)


def speed_up(site: Site) -> None:
    """Undo `slow_down`."""
    for node in site.running:
        links.speed_up(node)


def fill(folder: str) -> Fault:
    """Return the fault of a full ``folder`` on the node."""
    path = f"{folder}/{FILLED}"

    def inject(site: Site) -> None:
        command = f"dd if=/dev/zero of={path} bs=64k 2>/dev/null; test -s {path}"
        site.cluster.output(site.node, ["sh", "-c", command])

    def remove(site: Site) -> None:
        for node in site.running:
            site.cluster.output(node, ["rm", "--force", path])

    return Fault(inject, remove)


def limit_memory(site: Site) -> None:
    """Limit the node's memory to its use plus the least slack that the kernel accepts, then fill it.

    Returns when the kernel or Ray has ended a process for it; `UserError` if neither does.
    """
    cgroup = memory_cgroup(site.node)
    before = kills(cgroup)
    slack = _limit(site, cgroup)
    size = (slack + OVERFLOW) // MEGABYTE
    command = f"dd if=/dev/zero of={SHARED_MEMORY}/{FILLED} bs=1M count={size} 2>/dev/null"
    with contextlib.suppress(UserError):  # this command or the whole node may be ended
        site.cluster.output(site.node, ["sh", "-c", command])
    until = time.monotonic() + KILL_SECONDS
    while processes(site.node, site.process) and kills(cgroup) == before:
        if time.monotonic() > until:
            raise UserError(f"no process on {site.node.name} was ended at its memory limit")
        time.sleep(POLL_SECONDS)


def memory_cgroup(node: Container) -> Path:
    """Return the folder of the cgroup that limits the memory of ``node``, of version 1 or 2."""
    node.reload()
    text = (PROC / str(node.attrs["State"]["Pid"]) / "cgroup").read_text(encoding="utf-8")
    paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in text.splitlines())}
    parent = CGROUPS / "memory" if "memory" in paths else CGROUPS
    return parent / paths.get("memory", paths.get("", "")).removeprefix("/")


def counters(file: Path) -> dict[str, int]:
    """Return the numbers in a file of a cgroup, by name; none if there is no such file."""
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        return {}
    return {name: int(number) for name, number in map(str.split, lines)}


def unreclaimable(cgroup: Path) -> int:
    """Return the bytes below which the memory of a cgroup cannot be limited without ending a process."""
    known = counters(cgroup / "memory.stat")
    names = next(names for file, names in UNRECLAIMABLE.items() if (cgroup / file).exists())
    return sum(known.get(name, 0) for name in names)  # older kernels count fewer


def kills(cgroup: Path) -> int | None:
    """Return how often the kernel ended a process of a cgroup at its limit; None if the cgroup is gone."""
    found = (counters(cgroup / file).get("oom_kill") for file in UNRECLAIMABLE)
    return next((count for count in found if count is not None), None)


def _limit(site: Site, cgroup: Path) -> int:
    """Limit the memory of the node; return the bytes of slack above its use.

    With version 2 of cgroups the kernel refuses no limit; it may end a process at once.
    """
    for slack in SLACK:
        limit = unreclaimable(cgroup) + slack
        try:
            site.node.update(mem_limit=limit, memswap_limit=limit)
            return slack
        except docker.errors.APIError:
            continue  # the kernel cannot reclaim that much
    raise UserError(f"the memory of {site.node.name} cannot be limited to what it uses")


def processes(node: Container, prefix: str) -> list[int]:
    """Return the pids on ``node`` of processes whose command begins with ``prefix``; none if it has ended."""
    try:
        table = node.top(ps_args="-eo pid,args")["Processes"] or []
    except docker.errors.APIError:  # the node is not running
        return []
    return [int(pid) for pid, command in table if command.startswith(prefix)]


def unlimit_memory(site: Site) -> None:
    """Undo `limit_memory`."""
    site.node.update(mem_limit=UNLIMITED, memswap_limit=UNLIMITED)
    fill(SHARED_MEMORY).remove(site)


FAULTS = {
    "node killed": Fault(lambda site: site.node.kill()),
    "process killed": Fault(kill_process, lasts=False),
    "link cut": Fault(cut_link, restore_link),
    "node paused": Fault(lambda site: pause(site.node), lambda site: site.node.unpause()),
    "disk of the checkpoints full": replace(fill(CHECKPOINTS), expected_nodes=lambda site: site.ranks),
    "head restarted": Fault(
        lambda site: site.cluster.head.restart(timeout=0),
        expected_nodes=lambda _: [remote.SERVER],
        lasts=False,
    ),
    f"link slowed to {MEGABITS} Mbit/s": Fault(slow_down, speed_up),
    "shared memory full": fill(SHARED_MEMORY),
    "memory limit hit": Fault(limit_memory, unlimit_memory),
}


def rejoin(cluster: Cluster) -> None:
    """Start the nodes that have ended until Ray lists all of them; `UserError` after `REJOIN_SECONDS`.

    Ray ends a node that it had declared dead as soon as the node reconnects.
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
