"""Finds what a dead run left on this node: processes and segments of this user in this container."""

import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlhf_stack.cleanup import process_table, terminate
from rlhf_stack.cleanup.process_table import Process

KUBERNETES = "KUBERNETES_SERVICE_HOST"  # in every container of a pod
WORKER_MARK = "RAY_RAYLET_PID"  # set by Ray for its workers, and inherited by their children
CLIENT_SERVER = "--runtime-env-agent-address="  # in the command of the one that `ray start` starts
TRACKER = "multiprocessing.resource_tracker import main"  # ends after all processes that it cleans up for
STARTING = "ray/_private/workers/"  # in the command of a worker that has not renamed itself yet
SHM = Path("/dev/shm")  # noqa: S108  (the location of segments)
# Names of segments: of multiprocessing (vLLM's queues, torch's data loaders), torch, NCCL and vLLM.
SEGMENT = re.compile(r"(psm_|sem\.mp-|torch_\d+_|nccl-|mp-)\w*|\S+-cpushm_\d+")
OWN_SHM = "shm"  # the mount source of a /dev/shm that Docker created for this container alone
EXIT_SECONDS = 5.0
HIDING = (
    "hidepid=1",
    "hidepid=2",
    "hidepid=4",
    "hidepid=noaccess",
    "hidepid=invisible",
    "hidepid=ptraceable",
)
HOST_PIDS = "pid:[4026531836]"  # the kernel's initial PID namespace, in which every process is visible


@dataclass(frozen=True)
class Segment:
    """A shared-memory file; ``size`` in bytes, ``age`` in seconds since its last change."""

    path: str
    size: int
    uid: int
    age: float


def orphaned_workers(table: Sequence[Process], uid: int) -> list[Process]:
    """The Ray workers of ``uid`` and their children without a live worker of a live raylet as ancestor.

    Children of Ray workers inherit `WORKER_MARK`, even if they get another parent. Python's resource tracker
    is none of them: `compat.resource_tracker` detaches that of a live engine.
    """
    raylets = {p.pid for p in table if p.role == process_table.RAYLET and p.state != process_table.ZOMBIE}
    used = process_table.descendants((p.pid for p in table if _in_use(p, raylets)), table)
    return [
        p
        for p in table
        if p.pid not in used and p.uid == uid and p.state != process_table.ZOMBIE and _is_from_worker(p)
        if TRACKER not in p.line
    ]


def stale_session_processes(
    table: Sequence[Process], uid: int, age: Mapping[int, float], least: float
) -> list[Process]:
    """The server processes of ``uid`` whose Ray session has neither a raylet nor a running `ray start`.

    Ray's client server does not name its session: it is stale without any raylet. ``age`` in seconds by pid;
    a process younger than ``least`` may belong to a node that is starting.
    """
    alive = {p.session for p in table if p.role == process_table.RAYLET}
    starting = {p.pid for p in table if "start" in p.command and "ray" in " ".join(p.command)}
    held = process_table.descendants(starting, table)
    return [
        p
        for p in table
        if p.role in (process_table.GCS, process_table.HELPER)
        and (p.session not in alive if p.session else not alive and CLIENT_SERVER in p.line)
        and p.uid == uid
        and p.pid not in held
        and age.get(p.pid, 0.0) >= least
    ]


def unused_segments(
    segments: Iterable[Segment], open_paths: set[str], uid: int, least: float
) -> list[Segment]:
    """The segments of ``uid`` at least ``least`` seconds old that no process has open or mapped."""
    return [s for s in segments if s.uid == uid and s.path not in open_paths and s.age >= least]


def process_ages(table: Iterable[Process]) -> dict[int, float]:
    """The seconds since the start of each process, by pid."""
    up = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    tick = os.sysconf("SC_CLK_TCK")
    return {process.pid: up - process.started / tick for process in table}


def segments(now: float, folder: Path = SHM) -> list[Segment]:
    """The segments with names that the stack uses; ``now`` in Unix seconds. Links and folders are none."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if SEGMENT.match(path.name):
            with suppress(FileNotFoundError):  # its process has removed it
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    found.append(Segment(str(path), status.st_size, status.st_uid, now - status.st_mtime))
    return found


def open_segments(table: Iterable[Process], proc: Path = process_table.PROC) -> set[str] | None:
    """The files in /dev/shm that a process of ``table`` has open or mapped; None if some can be hidden.

    All are visible if /dev/shm belongs to this container only, or if this is the host, and /proc hides none;
    ``table`` then has those of all containers. The containers of a pod share /dev/shm.
    """
    if (
        KUBERNETES in os.environ
        or _hides_processes(proc)
        or not (_shm_is_own(proc) or str((proc / "self" / "ns" / "pid").readlink()) == HOST_PIDS)
    ):
        return None
    found: set[str] = set()
    for process in table:
        if process.state == process_table.ZOMBIE:
            continue  # it has released its files, and only root may read them
        folder = proc / str(process.pid)
        try:
            links = [str(link.readlink()) for link in (folder / "fd").iterdir()]
            mapped = (folder / "maps").read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            continue  # it has ended
        except PermissionError:
            # A process that has released its memory is readable by root only until it ends. A process of
            # another user cannot have a segment of ours open.
            if process.uid == os.getuid() and not terminate.exits_within(process, EXIT_SECONDS):
                return None
            continue
        found |= {link for link in links if link.startswith(str(SHM))}
        found |= set(re.findall(rf"{SHM}/\S+", mapped))
    return found


def remove_segment(segment: Segment) -> bool:
    """Remove a segment unless a process has opened it since; report whether it is gone.

    It is renamed first, so that no process opens it between the check and the removal.
    """
    path = Path(segment.path)
    hidden = path.with_name(f"{path.name}.reaped-{os.getpid()}")
    try:
        path.rename(hidden)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    used = open_segments(process_table.snapshot(everywhere=True))
    if used is None or {str(path), str(hidden)} & used:
        hidden.rename(path)
        return False
    hidden.unlink(missing_ok=True)
    return True


def _hides_processes(proc: Path) -> bool:
    """Whether ``proc`` is mounted with hidepid, so that users see only their own processes."""
    return os.getuid() != 0 and any(option in _mount(proc, process_table.PROC) for option in HIDING)


def _shm_is_own(proc: Path) -> bool:
    return _mount(proc, SHM).split()[1:2] == [OWN_SHM]


def _mount(proc: Path, path: Path) -> str:
    """Type, source and options of what is mounted at ``path``: the last one hides those before it."""
    found = ""
    for line in (proc / "self" / "mountinfo").read_text(encoding="utf-8").splitlines():
        before, _, after = line.partition(" - ")
        found = after if before.split()[4] == str(path) else found
    return found


def _in_use(process: Process, raylets: set[int]) -> bool:
    """Whether a live raylet is the parent of the process, which is a worker or a helper of the node."""
    if process.parent not in raylets:
        return False
    known = process.role in (process_table.WORKER, process_table.HELPER)
    return known or any(STARTING in word for word in process.command)


def _is_from_worker(process: Process) -> bool:
    """Whether a raylet or a worker started it; the title of an agent may overwrite its environment."""
    title = process.command[0] if process.command else ""
    return title.startswith(process_table.TITLE) or WORKER_MARK in (process.variables or {})
