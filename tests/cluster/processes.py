"""The processes that a test started, by a variable that they inherit."""

import time
from pathlib import Path

MARK = "RLHF_STACK_TEST_RUN"
END_SECONDS = 60


def marked(mark: str) -> dict[int, str]:
    """The processes, by id, that were started with ``mark`` in their environment; zombies have ended."""
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


def ended(mark: str, seconds: float) -> list[str]:
    """The commands of the marked processes that still run after ``seconds``."""
    end = time.monotonic() + seconds
    while (found := marked(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    return list(found.values())
