"""Fixtures of the tests that run in the image, on Ray nodes and GPUs simulated on one machine."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import replacing
from processes import END_SECONDS, MARK, marked, still_running
from rlhf_stack.config import env_vars
from rlhf_stack.telemetry import events

SIMULATED = Path(__file__).with_name("simulated.py")
SHARED = Path("/dev/shm")


@dataclass(frozen=True)
class Run:
    """A training run that has ended."""

    code: int
    log: str
    seconds: float
    events: list[dict[str, Any]]
    left_over: list[str]  # commands that still run, and new files in shared memory
    trained: Path  # the folder of the trained model, unless the arguments name another one

    def of(self, event: str) -> list[dict[str, Any]]:
        """Return the events of one kind."""
        return [found for found in self.events if found["event"] == event]


@pytest.fixture(scope="session", autouse=True)
def noting(request: pytest.FixtureRequest) -> None:
    """Let the runs of `integration` note the changes of patches that they execute, in marked packages.

    The other suites run what is installed.
    """
    if not (proofs := os.environ.get("RLHF_STACK_PROOFS")):
        return
    path = [str(request.getfixturevalue("marked")), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    os.environ["RLHF_STACK_EXECUTED"] = str(Path(proofs, "executed"))


@pytest.fixture(scope="session")
def operators() -> None:
    """Compile what DeepSpeed needs on CPUs, and images for GPUs lack.

    A run that ends while it compiles leaves a lock, for which each later run would wait.
    """
    if replacing.is_needed():
        subprocess.run(
            [sys.executable, "-c", "from deepspeed.comm.torch import build_shm_op; build_shm_op()"],
            env=os.environ | replacing.TRAINER,
            check=True,
        )


@pytest.fixture
def train(operators: None) -> Iterator[Callable[..., Run]]:
    """Run OpenRLHF's trainer on simulated nodes, with a deadline, and clean up afterwards."""
    folders = Path(tempfile.mkdtemp(prefix="rl"))  # short: Ray's sockets are below it
    mark = folders.name
    numbers = itertools.count()

    def run(
        layout: str,
        gpus: Sequence[int],
        steps: int,
        seconds: float,
        *changes: str,
        heads: int = 0,
        **variables: str | None,
    ) -> Run:
        folder = folders / str(next(numbers))
        folder.mkdir()
        start, shared = time.monotonic(), set(SHARED.iterdir())
        environment = {
            MARK: mark,
            "RAY_TMPDIR": str(folder),
            env_vars.EVENTS: str(folder / "events"),
            env_vars.VERIFY_SYNC: "1",
            "HF_HUB_OFFLINE": "1",
        }
        combined = os.environ | environment | replacing.variables(folder) | variables
        log = folder / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [
                    sys.executable,
                    str(SIMULATED),
                    str(folder / "tiny"),
                    layout,
                    ",".join(map(str, gpus)),
                    str(steps),
                    str(heads),
                    *changes,
                ],
                env={name: value for name, value in combined.items() if value is not None},
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
        elapsed = time.monotonic() - start
        left_over = still_running(mark, END_SECONDS)
        left_over += sorted(str(file) for file in set(SHARED.iterdir()) - shared)
        trained = folder / "tiny" / "trained"
        return Run(code, log.read_text(), elapsed, events.read(folder / "events"), left_over, trained)

    yield run
    for number in marked(mark):
        os.kill(number, signal.SIGKILL)
    shutil.rmtree(folders, ignore_errors=True)
