"""What is built and tested for the default cell, for a submission and for a release."""

import functools
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from scripts.matrix.load import Matrix, expand, expand_all
from scripts.paths import ROOT
from scripts.testing import records
from scripts.testing.records import required
from scripts.testing.side_by_side import SCRIPTS, Job, Lanes, table

LANES = 2
ALONE = ("registry", "hip")  # hip changes committed files, so that no record after it is of a clean tree
LONGEST_FIRST = ("patches", "network", "cluster", "image", "layers")

Command = tuple[str, ...]
LINT: Command = (*SCRIPTS, "lint")
UNIT: Command = (sys.executable, "-m", "pytest", "tests/unit")
CHECKS: tuple[Command, ...] = (LINT, UNIT)


@dataclass(frozen=True)
class Plan:
    """Checks and builds, then suites side by side, then suites that have to run alone.

    Of the ``commands`` the unit tests run beside the others, which run one by one.
    """

    commands: tuple[Command, ...]
    jobs: tuple[Job, ...]
    alone: tuple[Job, ...] = ()


def for_default(matrix: Matrix) -> Plan:
    """Lint, unit tests, build and suites of the default cell."""
    jobs = tuple(Job(suite, matrix.default) for suite in LONGEST_FIRST)
    return Plan((*CHECKS, _build(matrix.default)), jobs)


def for_checks() -> Plan:
    """Lint and unit tests."""
    return Plan(CHECKS, ())


def for_submission(matrix: Matrix) -> Plan:
    """Build the cells that have ``ci_suites``, and run these."""
    cells = [cell for cell in expand_all(matrix) if cell.ci_suites]
    jobs = tuple(Job(suite, cell.id) for cell in cells for suite in cell.ci_suites)
    return Plan(tuple(_build(cell.id) for cell in cells), jobs)


def for_release(matrix: Matrix) -> Plan:
    """Lint, unit tests, build and every required suite of every cell (for ROCm, of its stand-in).

    The recipes of each variant with a ``compile_proof`` are also compiled, by ``hip`` for its first cell.
    """
    cells = [cell for cell in expand_all(matrix) if not cell.sources]
    jobs = [Job(suite, cell.id) for cell in cells for suite in required(cell)]
    jobs += [
        Job("hip", next(cell.id for cell in expand(matrix) if cell.variant == variant.name))
        for variant in matrix.variants
        if variant.compile_proof
    ]
    alone = tuple(job for job in jobs if job.suite in ALONE)
    builds = tuple(_build(cell.id) for cell in cells)
    return Plan((*CHECKS, *builds), tuple(job for job in jobs if job not in alone), alone)


def run(plan: Plan, again: bool = False) -> int:
    """Carry out a plan up to the first of its three parts that fails; 1 if one failed.

    With ``again`` suites run also after a pass.
    """
    if _check_and_build(plan.commands) or run_side_by_side(plan.jobs, again):
        return 1
    return int(any(_run(tuple(job.command(again))) for job in plan.alone))


def _check_and_build(commands: Sequence[Command]) -> int:
    """Run the commands; 1 if one failed, after which the ones that would follow it do not run."""
    lanes = Lanes()
    parts = [[one for one in commands if (one == UNIT) == is_unit] for is_unit in (False, True)]
    failed: list[bool] = []

    def run_part(part: Sequence[Command]) -> None:
        failed.append(any(_recorded(lanes, command) for command in part))

    lanes.call([functools.partial(run_part, part) for part in parts], len(parts))
    return int(any(failed))


def run_side_by_side(jobs: Sequence[Job], again: bool = False) -> int:
    """Run suites, two at a time, and print a table of their results; 1 if one failed."""
    lanes = Lanes(again)
    lanes.run(jobs, LANES)
    Console().print(table(lanes.outcomes))
    return int(any(code for _, code, _ in lanes.outcomes))


def _build(cell: str) -> Command:
    return (*SCRIPTS, "build", cell)


def _recorded(lanes: Lanes, command: Command) -> int:
    """Run a command and return its exit code; record lint and the unit tests, as results of the checkout."""
    name = {LINT: "lint", UNIT: "unit"}.get(command, f"build {command[-1]}")
    print(f"{name} | $ {' '.join(command[1:])}", flush=True)
    if command not in CHECKS:
        return lanes.execute(command, name)
    with tempfile.TemporaryDirectory() as folder, records.recording(records.checkout(), name) as tally:
        if command == LINT:
            printed: list[str] = []
            tally.code = lanes.execute(command, name, printed)
            tally.attach("".join(printed).encode(), ".txt")
            tally.count("lint", records.FAILED if tally.code else records.PASSED)
        else:
            junit = Path(folder, "junit.xml")
            tally.add(junit, lanes.execute((*command, f"--junitxml={junit}"), name))
    return tally.code


def _run(command: Command) -> int:
    """Run a command to its end; on an interrupt it cleans up first. Not `subprocess.run`, which kills it."""
    print(f"$ {' '.join(command[1:])}", flush=True)
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
