"""Processes that a test started, identified by an inherited environment variable."""

import time
from pathlib import Path

MARK = "RLHF_STACK_TEST_RUN"
END_SECONDS = 60


def marked(mark: str) -> dict[int, str]:
    """Return the commands by process id that have ``mark`` in their environment, without zombies."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"{MARK}={mark}".encode() in environment.split(b"\0") and command:
            found[int(folder.name)] = command.strip()
    return found


def still_running(mark: str, seconds: float) -> list[str]:
    """Wait up to ``seconds`` for the marked processes; return the commands that still run."""
    end = time.monotonic() + seconds
    while (found := marked(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    return list(found.values())
