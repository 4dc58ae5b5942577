"""Run the tests of the host's side against the image of a cell, and keep what they said of it.

``python -m scripts.testing.on_host {layers,network,registry,faults} [CELL]``, then arguments for pytest: with
these, which choose some of the tests, no record is kept.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts.docker.client import connect, with_docker_errors
from scripts.errors import UserError, run
from scripts.matrix.load import Cell, find, load
from scripts.paths import ROOT
from scripts.testing import records
from scripts.testing.in_image import built

SUITES = ("layers", "network", "registry", "faults")


def run_pytest(cell: Cell, suite: str, arguments: Sequence[str], junit: Path) -> int:
    """Run a suite in this process; pytest's exit code. Interrupted, it is an interrupt here too."""
    code = pytest.main([str(ROOT / "tests" / suite), f"--cell={cell.id}", f"--junitxml={junit}", *arguments])
    if code == pytest.ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    return int(code)


def main() -> int:
    """The command line; exit code 1 when a test failed."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.testing.on_host", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("cell", nargs="?", help="a cell id; the default cell if none is given")
    options, arguments = parser.parse_known_args()
    matrix = load()
    cell = find(matrix, options.cell or matrix.default)
    client = connect()
    image = built(client, cell)
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder, "junit.xml")
        if arguments:
            return min(1, run_pytest(cell, options.suite, arguments, junit))
        with records.kept(cell.id, image, options.suite) as tally:
            tally.add(junit, run_pytest(cell, options.suite, [], junit))
            if built(client, cell) != image:
                raise UserError(f"{cell.tag} was built anew while its tests ran: run them again")
    return min(1, tally.code)


if __name__ == "__main__":
    run(with_docker_errors(main))
