"""Locks between processes of one checkout that would overwrite each other's files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def exclusive_lock(folder: Path, activity: str) -> Iterator[None]:
    """Hold ``folder`` for this process alone; a process that has to wait prints for which ``activity``."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        print(f"waiting for {activity} that is already running", flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
