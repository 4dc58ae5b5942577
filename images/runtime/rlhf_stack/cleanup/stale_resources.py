"""What a dead run left on this node: of this user, in this container, and of a run of Ray that is over."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_stack.cleanup import process_table, terminate
from rlhf_stack.cleanup.process_table import Process

OF_A_WORKER = "RAY_RAYLET_PID"  # Ray gives it to its workers, and they to what they start
STARTING = "ray/_private/workers/"  # a worker that has not its name yet
SHM = Path("/dev/shm")  # noqa: S108  (where segments are)
# The names of segments: multiprocessing's (of vLLM's queues and torch's loaders), torch's, NCCL's and vLLM's.
SEGMENT = re.compile(r"(psm_|sem\.mp-|torch_\d+_|nccl-|mp-)\w*|\S+-cpushm_\d+")
OWN_SHM = (
    "shm"  # what Docker calls the /dev/shm of one container; another container's segments lie in no such one
)
ENDING_SECONDS = 5.0
FIRST_CONTAINER = (
    "pid:[4026531836]"  # the kernel's number for the machine itself, where every process is seen
)


@dataclass(frozen=True)
class Segment:
    """A file of shared memory; ``age`` in seconds since it was last changed."""

    path: str
    size: int
    uid: int
    age: float


def orphaned_workers(table: Sequence[Process], uid: int) -> list[Process]:
    """The workers of Ray, and what they started, of ``uid``, that no living worker of a living raylet holds.

    Whatever Ray's workers start carries `OF_A_WORKER`, also when it is handed to another parent.
    """
    raylets = {p.pid for p in table if p.role == process_table.RAYLET and p.state != process_table.ZOMBIE}
    used = process_table.descendants((p.pid for p in table if _in_use(p, raylets)), table)
    return [
        p
        for p in table
        if p.pid not in used and p.uid == uid and p.state != process_table.ZOMBIE and _of_a_worker(p)
    ]


def stale_session_processes(
    table: Sequence[Process], uid: int, age: Mapping[int, float], least: float
) -> list[Process]:
    """The processes of ``uid`` that serve a session of Ray of which no raylet and no `ray start` lives here.

    ``age`` in seconds, by number; one younger than ``least`` may belong to a node that is starting.
    """
    alive = {p.session for p in table if p.role == process_table.RAYLET}
    starting = {p.pid for p in table if "start" in p.command and "ray" in " ".join(p.command)}
    held = process_table.descendants(starting, table)
    return [
        p
        for p in table
        if p.role in (process_table.GCS, process_table.HELPER)
        and p.session
        and p.session not in alive
        and p.uid == uid
        and p.pid not in held
        and age.get(p.pid, 0.0) >= least
    ]


def unused_segments(segments: Iterable[Segment], held: set[str], uid: int, least: float) -> list[Segment]:
    """The segments of ``uid`` that no process has open or mapped, older than ``least`` seconds."""
    return [s for s in segments if s.uid == uid and s.path not in held and s.age >= least]


def process_ages(table: Iterable[Process]) -> dict[int, float]:
    """For each process how long ago it started, in seconds."""
    up = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    tick = os.sysconf("SC_CLK_TCK")
    return {process.pid: up - process.started / tick for process in table}


def segments(now: float, folder: Path = SHM) -> list[Segment]:
    """The segments whose names are those of the stack; ``now`` in unix seconds."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if SEGMENT.match(path.name):
            status = path.stat()
            found.append(Segment(str(path), status.st_size, status.st_uid, now - status.st_mtime))
    return found


def open_segments(table: Iterable[Process], proc: Path = process_table.PROC) -> set[str] | None:
    """The files under /dev/shm that a process has open or mapped; None if not every process can be asked.

    It can where /dev/shm is this container's own, or where this is the machine itself.
    """
    if not (_shm_is_own(proc) or str((proc / "self" / "ns" / "pid").readlink()) == FIRST_CONTAINER):
        return None
    found: set[str] = set()
    for process in table:
        if process.state == process_table.ZOMBIE:
            continue  # it holds nothing any more, and only root may ask it
        folder = proc / str(process.pid)
        try:
            links = [str(link.readlink()) for link in (folder / "fd").iterdir()]
            mapped = (folder / "maps").read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            continue  # it ended meanwhile
        except PermissionError:
            # One that has let go of its memory answers to root alone until it is over. Another user's holds
            # no segment that only we may open.
            if process.uid == os.getuid() and not terminate.exits_within(process, ENDING_SECONDS):
                return None
            continue
        found |= {link for link in links if link.startswith(str(SHM))}
        found |= set(re.findall(rf"{SHM}/\S+", mapped))
    return found


def _shm_is_own(proc: Path) -> bool:
    for line in (proc / "self" / "mountinfo").read_text(encoding="utf-8").splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[4] == str(SHM):
            return after.split()[1] == OWN_SHM
    return False


def _in_use(process: Process, raylets: set[int]) -> bool:
    """Whether a living raylet is the parent of a process for a reason: a worker, or a part of the node."""
    if process.parent not in raylets:
        return False
    known = process.role in (process_table.WORKER, process_table.HELPER)
    return known or any(STARTING in word for word in process.command)


def _of_a_worker(process: Process) -> bool:
    return process.role == process_table.WORKER or OF_A_WORKER in (process.variables or {})
