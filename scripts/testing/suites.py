"""Run suites side by side: ``python -m scripts.testing.suites SUITE:CELL...``

A suite waits for Ray most of its time, so two at a time end sooner than one after the other, on two cores
already. Every line carries its suite; all suites run, also after one has failed, and a table closes.
"""

import argparse
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from scripts.errors import UserError, run
from scripts.matrix.load import find, load
from scripts.paths import ROOT

LANES = 2
COMMANDS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "image": (("scripts.testing.in_image", "image"), ("scripts.testing.on_host", "layers")),
    "cluster": (("scripts.testing.in_image", "cluster"),),
    "integration": (("scripts.testing.in_image", "integration"),),
    "network": (("scripts.testing.on_host", "network"),),
    "patches": (("scripts.testing.in_image", "patches"),),
    "demo": (("scripts.testing.demo",),),
}


@dataclass(frozen=True)
class Job:
    """One suite on the image of one cell."""

    suite: str
    cell: str

    def commands(self) -> list[list[str]]:
        """The commands that are the suite, in their order."""
        return [[sys.executable, "-m", *command, self.cell] for command in COMMANDS[self.suite]]


@dataclass
class Lanes:
    """Runs jobs, and can end those that run; ``outcomes`` are exit code and seconds of each that ended."""

    outcomes: dict[Job, tuple[int, float]] = field(default_factory=dict)
    _running: list[subprocess.Popen[str]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ended: bool = False

    def run(self, jobs: Iterable[Job], lanes: int) -> None:
        """Run all jobs, ``lanes`` at a time; interrupted, those that run end first, each in its own way."""
        with ThreadPoolExecutor(lanes) as pool:
            running = [pool.submit(self._run, job) for job in jobs]
            try:
                for one in running:
                    one.result()
            except BaseException:
                self._end()
                raise

    def _run(self, job: Job) -> None:
        start = time.monotonic()
        codes = []
        for command in job.commands():
            with self._lock:
                if self._ended:
                    return
                process = _start(command, len(job.suite))
                self._running.append(process)
            with process:
                for line in process.stdout or ():
                    print(f"{job.suite} | {line}", end="", flush=True)
            codes.append(process.returncode)
        self.outcomes[job] = (max(map(abs, codes)), time.monotonic() - start)

    def _end(self) -> None:
        with self._lock:
            self._ended = True
            for process in self._running:
                process.terminate()


def _start(command: list[str], indent: int) -> subprocess.Popen[str]:
    columns = shutil.get_terminal_size().columns - indent - len(" | ")
    environment = {**os.environ, "COLUMNS": str(columns), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def parse(words: Iterable[str]) -> list[Job]:
    """``SUITE:CELL`` as jobs; a `UserError` names what is none."""
    matrix = load()
    jobs = []
    for word in words:
        suite, _, cell = word.partition(":")
        if suite not in COMMANDS:
            raise UserError(f"{word!r} begins with no suite: choose from {', '.join(COMMANDS)}")
        jobs.append(Job(suite, find(matrix, cell or matrix.default).id))
    return jobs


def table(outcomes: Mapping[Job, tuple[int, float]]) -> Table:
    """How each job ended, and after how many seconds."""
    shown = Table("suite", "cell", "seconds", "result")
    for job, (code, seconds) in outcomes.items():
        shown.add_row(
            job.suite, job.cell, f"{seconds:.0f}", f"failed, exit code {code}" if code else "passed"
        )
    return shown


def main() -> int:
    """The command line; exit code 1 when a suite failed."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.testing.suites", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("jobs", nargs="+", metavar="SUITE:CELL", help="without a cell, the default one")
    lanes = Lanes()
    lanes.run(parse(parser.parse_args().jobs), LANES)
    Console().print(table(lanes.outcomes))
    return int(any(code for code, _ in lanes.outcomes.values()))


if __name__ == "__main__":
    run(main)
