"""Reads the processes of this machine or container, and their role in Ray.

The environment of another user's process is not readable and therefore None.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PROC = Path("/proc")
RAYLET, GCS, WORKER, DRIVER, HELPER, OTHER = "raylet", "gcs_server", "worker", "driver", "helper", "other"
SESSION = re.compile(r"session_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_\d+_\d+")
GCS_ADDRESS = re.compile(r"--gcs-address=(\S+)")
RESOURCES = re.compile(r"--static_resource_list=(\S+)")
TITLE = "ray::"  # of processes that the raylet starts
AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
HELPERS = (
    "ray/_private/log_monitor.py",
    "ray/dashboard/",
    "ray/_private/runtime_env/",
    "ray.util.client.server",
    "ray/autoscaler/_private/monitor.py",
)
JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by Ray's job server for the driver and inherited by its children
ZOMBIE = "Z"


@dataclass(frozen=True)
class Process:
    """A process, identified by ``pid`` and ``started`` (clock ticks since boot)."""

    pid: int
    parent: int
    uid: int
    state: str
    started: int
    command: tuple[str, ...]
    variables: Mapping[str, str] | None = field(default=None, repr=False)

    @property
    def role(self) -> str:
        """Its role in Ray, derived from its command and environment."""
        first = self.command[0] if self.command else ""
        if first.startswith(TITLE):
            return HELPER if first.strip() in AGENTS else WORKER
        if Path(first).name in (RAYLET, GCS):
            return Path(first).name
        if any(mark in word for word in self.command for mark in HELPERS):
            return HELPER
        return DRIVER if self.variables and JOB in self.variables else OTHER

    @property
    def session(self) -> str | None:
        """The Ray session in its command, such as "session_2026-11-21_18-46-39_814375_9"; None if none."""
        found = SESSION.search(" ".join(self.command))
        return found[0] if found else None

    @property
    def line(self) -> str:
        """Its command in one line."""
        return " ".join(" ".join(self.command).split())


def snapshot(proc: Path = PROC, everywhere: bool = False) -> list[Process]:
    """Read all visible processes, ordered by pid; those that end meanwhile or are hidden are omitted.

    On a host, the processes of containers are omitted too, unless ``everywhere``.
    """
    found, ours = [], _container(proc / "self")
    for folder in sorted(proc.glob("[0-9]*"), key=lambda path: int(path.name)):
        # PermissionError: a process of another user, where /proc is mounted with hidepid.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if everywhere or _container(folder) in (ours, None):
                found.append(_read(folder))
    return found


def descendants(pids: Iterable[int], processes: Iterable[Process]) -> set[int]:
    """Return ``pids`` and those of all their descendants."""
    below: dict[int, list[int]] = {}
    for process in processes:
        below.setdefault(process.parent, []).append(process.pid)
    found: set[int] = set()
    pending = list(pids)
    while pending:
        pid = pending.pop()
        if pid not in found:
            found.add(pid)
            pending += below.get(pid, [])
    return found


def gcs_address(processes: Iterable[Process]) -> str | None:
    """The GCS address of the raylet of this machine; None without a raylet."""
    for process in processes:
        found = GCS_ADDRESS.search(process.line) if process.role == RAYLET else None
        if found:
            return found[1]
    return None


def declared_resources(processes: Iterable[Process]) -> dict[str, float]:
    """The resources that the raylet of this machine declares, such as ``GPU``; empty without a raylet.

    ``memory`` and ``object_store_memory`` are in bytes.
    """
    for process in processes:
        found = RESOURCES.search(process.line) if process.role == RAYLET else None
        if found:
            words = found[1].split(",")
            return {name: float(amount) for name, amount in zip(words[::2], words[1::2], strict=False)}
    return {}


def _read(folder: Path) -> Process:
    # Fields after the command in brackets, which may contain any character: state, parent, ..., start (20th).
    status = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    command = (folder / "cmdline").read_bytes().rstrip(b"\0").decode(errors="replace")
    return Process(
        pid=int(folder.name),
        parent=int(status[1]),
        uid=folder.stat().st_uid,
        state=status[0],
        started=int(status[19]),
        command=tuple(command.split("\0")) if command else (),
        variables=_variables(folder),
    )


def _container(folder: Path) -> str | None:
    """The PID namespace of a process, which identifies its container; None if not readable."""
    try:
        return str((folder / "ns" / "pid").readlink())
    except PermissionError:
        return None


def _variables(folder: Path) -> dict[str, str] | None:
    try:
        content = (folder / "environ").read_bytes()
    except PermissionError:
        return None
    pairs = (entry.partition(b"=") for entry in content.split(b"\0") if b"=" in entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
