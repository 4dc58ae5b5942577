"""Run suites and checks side by side, each as a process of its own.

A suite waits for Ray most of its time, so two suites at a time finish sooner than one after the other, even
on two cores. Each line of output begins with its suite, and its cell if there are several; all suites run,
also after one has failed.
"""

import functools
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from rich.table import Table

from scripts.errors import UserError
from scripts.matrix.load import Matrix, find
from scripts.matrix.suites import SUITES
from scripts.paths import ROOT

SCRIPTS = (sys.executable, "-m", "scripts")


@dataclass(frozen=True)
class Job:
    """A suite on the image of a cell."""

    suite: str
    cell: str

    def command(self, again: bool) -> list[str]:
        """The command that runs the suite, with ``again`` also after a pass."""
        declared = SUITES[self.suite]
        suite = [self.suite] if declared.place == "command" else ["test", self.suite]
        return [*SCRIPTS, *suite, self.cell, *(["--again"] if again and not declared.always else [])]


Outcome = tuple[Job, int, float]


@dataclass
class Lanes:
    """Runs jobs, ``again`` also after a pass, and ends the running ones on an interrupt.

    ``outcomes`` are the jobs that ended, with exit code and seconds; a job may be in it twice.
    """

    again: bool = False
    outcomes: list[Outcome] = field(default_factory=list)
    _running: list[subprocess.Popen[str]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ended: bool = False

    def run(self, jobs: Sequence[Job], lanes: int) -> None:
        """Run all jobs, ``lanes`` at a time; an interrupt first lets the running jobs clean up."""
        names = labels(jobs)
        self.call([functools.partial(self._run, job, names[job]) for job in jobs], lanes)

    def call(self, tasks: Sequence[Callable[[], object]], lanes: int) -> None:
        """Call all tasks, ``lanes`` at a time; an interrupt first lets running processes clean up."""
        with ThreadPoolExecutor(lanes) as pool:
            running = [pool.submit(task) for task in tasks]
            try:
                for future in running:
                    future.result()
            except BaseException:
                self._end()
                raise

    def _run(self, job: Job, name: str) -> None:
        start = time.monotonic()
        code = self.execute(job.command(self.again), name)
        self.outcomes.append((job, code, time.monotonic() - start))

    def execute(self, command: Sequence[str], name: str, printed: list[str] | None = None) -> int:
        """Run a command, each line of its output after ``name``; return its exit code.

        The lines are added to ``printed``.
        After an interrupt of `call` it raises one too, in its own thread, so that nothing is recorded.
        """
        with self._lock:
            if self._ended:
                raise KeyboardInterrupt
            process = _start(command, len(name))
            self._running.append(process)
        with process:
            for line in process.stdout or ():
                print(f"{name} | {line}", end="", flush=True)
                if printed is not None:
                    printed.append(line)
        if self._ended:
            raise KeyboardInterrupt
        return abs(int(process.returncode))

    def _end(self) -> None:
        with self._lock:
            self._ended = True
            for process in self._running:
                process.terminate()


def labels(jobs: Sequence[Job]) -> dict[Job, str]:
    """What each job's lines begin with: its suite, and its cell unless all jobs have the same one."""
    several = len({job.cell for job in jobs}) > 1
    return {job: f"{job.suite} {job.cell}" if several else job.suite for job in jobs}


def _start(command: Sequence[str], indent: int) -> subprocess.Popen[str]:
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


def parse(words: Iterable[str], matrix: Matrix) -> list[Job]:
    """The jobs of ``SUITE:CELL`` words; without a cell, the default one. A `UserError` names a wrong word."""
    jobs = []
    for word in words:
        suite, colon, cell = word.partition(":")
        if suite not in SUITES:
            raise UserError(f"{word!r}: no suite {suite!r}; choose from {', '.join(SUITES)}")
        if colon and not cell:
            raise UserError(f"{word!r}: no cell after the colon")
        jobs.append(Job(suite, find(matrix, cell or matrix.default).id))
    return jobs


def table(outcomes: Iterable[Outcome]) -> Table:
    """The result and the seconds of each job."""
    rows = Table("suite", "cell", "seconds", "result")
    for job, code, seconds in outcomes:
        result = f"failed, exit code {code}" if code else "passed"
        rows.add_row(job.suite, job.cell, f"{seconds:.0f}", result)
    return rows
