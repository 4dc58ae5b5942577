"""These tests run inside the image. Ray's nodes are simulated in one kernel, and so are their GPUs."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rlhf_stack import events, settings

MARK = "RLHF_STACK_TEST_RUN"
TWO_NODES = Path(__file__).with_name("two_nodes.py")
END_SECONDS = 20


@dataclass(frozen=True)
class Run:
    """A training run that has ended."""

    code: int
    log: str
    seconds: float
    events: list[dict[str, Any]]
    left_over: list[str]

    def of(self, event: str) -> list[dict[str, Any]]:
        """The events of one kind."""
        return [found for found in self.events if found["event"] == event]


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


@pytest.fixture
def train() -> Iterator[Callable[..., Run]]:
    """Run OpenRLHF's trainer on two simulated nodes, with a deadline; afterwards nothing of it is left."""
    folder = Path(tempfile.mkdtemp(prefix="rl"))  # short: Ray's sockets are below it
    mark = folder.name

    def run(layout: str, gpus: int, steps: int, seconds: float, *changes: str, **variables: str) -> Run:
        start = time.monotonic()
        environment = {
            MARK: mark,
            "RAY_TMPDIR": str(folder),
            settings.EVENTS: str(folder / "events"),
            settings.VERIFY_SYNC: "1",
            "HF_HUB_OFFLINE": "1",
        }
        log = folder / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [
                    sys.executable,
                    str(TWO_NODES),
                    str(folder / "tiny"),
                    layout,
                    str(gpus),
                    str(steps),
                    *changes,
                ],
                env=os.environ | environment | variables,
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                pytest.fail(f"not done after {seconds:g} s:\n{log.read_text()[-5000:]}")
        found = events.read(folder / "events")
        took = time.monotonic() - start
        return Run(code, log.read_text(), took, found, ended(mark, END_SECONDS))

    yield run
    for number in marked(mark):
        os.kill(number, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
