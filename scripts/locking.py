"""Processes of one checkout that would write over each other's files take turns."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def turn(folder: Path, what: str) -> Iterator[None]:
    """Wait until no other process is in its turn with ``folder``; ``what`` is told to who has to wait."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".turn").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for {what} that runs already", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
