"""Repeats a suite on one image, to find tests that fail intermittently.

``python -m tests.bench.flakes [SUITE] [--runs 10] [--cell CELL] [--json]``; ten times as long as the suite.
The output of each run is in ``build/flakes``. No record of the image is written.
"""

import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from scripts.docker.client import with_docker_errors
from scripts.errors import UserError, run
from scripts.matrix.load import find, load
from scripts.paths import ROOT
from scripts.testing.commands import PYTEST_SUITES
from scripts.testing.side_by_side import Job
from tests.bench.results import parser

LOGS = ROOT / "build" / "flakes"
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::.+?)(?: - .*)?$", re.MULTILINE)
PASSED = re.compile(r"\b(\d+) passed\b")


@dataclass(frozen=True)
class SuiteRun:
    """The result of one run of a suite."""

    passed: int
    failed: tuple[str, ...]
    seconds: float


def run_suite(suite: str, cell: str, log: Path) -> SuiteRun:
    """Run the suite; `UserError` if it fails without a failed test."""
    start = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        command = [*Job(suite, cell).command(again=True), "-rfE"]
        code = subprocess.run(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode
    text = log.read_text(encoding="utf-8")
    failed = tuple(FAILED.findall(text))
    if code and not failed:
        raise UserError(f"{suite} failed without a failed test: {log.relative_to(ROOT)}")
    return SuiteRun(sum(map(int, PASSED.findall(text))), failed, time.monotonic() - start)


def show(suite: str, runs: Sequence[SuiteRun]) -> None:
    """Print the runs, and for each failed test how often it failed."""
    table = Table("run", "passed", "failed", "seconds", title=suite)
    for number, one in enumerate(runs, 1):
        table.add_row(str(number), str(one.passed), str(len(one.failed)), f"{one.seconds:.0f}")
    console = Console()
    console.print(table)
    for test, count in Counter(test for one in runs for test in one.failed).most_common():
        console.print(f"failed in {count} of {len(runs)} runs: {test}", soft_wrap=True)


def main() -> int:
    """Run the command line; a flaky test is a result and not an error."""
    options = parser("flakes", __doc__)
    options.add_argument("suite", nargs="?", default="cluster", choices=PYTEST_SUITES)
    options.add_argument("--runs", type=int, default=10, help="number of runs (10)")
    arguments = options.parse_args()
    matrix = load()
    cell = find(matrix, arguments.cell or matrix.default)
    LOGS.mkdir(parents=True, exist_ok=True)
    runs = []
    for number in range(1, arguments.runs + 1):
        print(f"{arguments.suite}: run {number} of {arguments.runs} ...", file=sys.stderr, flush=True)
        runs.append(run_suite(arguments.suite, cell.id, LOGS / f"{arguments.suite}-{number}.log"))
    if arguments.json:
        print(json.dumps([asdict(one) for one in runs]))
    else:
        show(f"{arguments.suite} on {cell.id}", runs)
    return 0


if __name__ == "__main__":
    run(with_docker_errors(main))
