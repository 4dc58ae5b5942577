"""Terminates exactly the given processes, by pidfd, so that a reused pid is never signalled."""

import os
import select
import signal
import time
from collections.abc import Iterable

from rlhf_stack.cleanup.process_table import Process, snapshot

TERM_SECONDS = 5.0


def terminate_processes(processes: Iterable[Process], seconds: float = TERM_SECONDS) -> list[int]:
    """Send SIGTERM, and SIGKILL after ``seconds``; return the pids of the processes that ended.

    A process that has already ended is skipped, also if its pid has been reused.
    """
    handles = {process.pid: handle for process in processes if (handle := _handle(process)) is not None}
    try:
        deadline = time.monotonic() + seconds
        _send(handles, signal.SIGTERM)
        _wait(handles, deadline)
        _send(handles, signal.SIGKILL)
        _wait(handles, time.monotonic() + seconds)
        return sorted(pid for pid, handle in handles.items() if _has_ended(handle))
    finally:
        for handle in handles.values():
            os.close(handle)


def exits_within(process: Process, seconds: float) -> bool:
    """Whether a process ends within ``seconds`` without being signalled."""
    handle = _handle(process)
    if handle is None:
        return True
    try:
        _wait({process.pid: handle}, time.monotonic() + seconds)
        return _has_ended(handle)
    finally:
        os.close(handle)


def _handle(process: Process) -> int | None:
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    same = any(p.pid == process.pid and p.started == process.started for p in snapshot())
    if same:
        return handle
    os.close(handle)
    return None


def _send(handles: dict[int, int], number: signal.Signals) -> None:
    for handle in handles.values():
        if not _has_ended(handle):
            signal.pidfd_send_signal(handle, number)


def _wait(handles: dict[int, int], deadline: float) -> None:
    for handle in handles.values():
        select.select([handle], [], [], max(0.0, deadline - time.monotonic()))


def _has_ended(handle: int) -> bool:
    return bool(select.select([handle], [], [], 0)[0])
