"""Run the pytest suites of the host against the image of a cell."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import docker

from scripts.errors import UserError
from scripts.matrix.load import Cell
from scripts.matrix.suites import SUITES
from scripts.paths import ROOT
from scripts.testing import credit, kept, records
from scripts.testing.in_image import local_image


def run_suite(
    client: docker.DockerClient, cell: Cell, suite: str, arguments: Sequence[str], again: bool
) -> int:
    """Run a suite; 1 when a test failed. With ``arguments`` for pytest, which may select tests, no record.

    A suite that passed before on this image (`testing.credit`) runs only ``again`` or with ``arguments``.
    """
    image = local_image(client, cell)
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder, "junit.xml")
        if arguments:
            return min(1, _run_pytest(cell, suite, arguments, junit))
        tested = records.subject(cell, client.images.get(image))
        if not again and credit.passed_before(tested, suite):
            return 0
        with credit.recording(tested, suite) as tally:
            tally.add(junit, _run_pytest(cell, suite, [], junit))
            if local_image(client, cell) != image:
                raise UserError(f"{cell.tag} was rebuilt while its tests ran: run them again")
        kept.keep(client, cell, tally.record)
    return min(1, tally.code)


def _run_pytest(cell: Cell, suite: str, arguments: Sequence[str], junit: Path) -> int:
    """Run a suite in this process and return pytest's exit code; an interrupt of pytest is raised again."""
    import pytest  # noqa: PLC0415  (half a second, which no other command needs)

    declared = SUITES[suite]
    folder = ROOT / "tests" / declared.folder
    # Without the option, a file that cannot be imported has the exit code of an interrupt.
    options = ["--continue-on-collection-errors", f"--cell={cell.id}", f"--junitxml={junit}"]
    code = pytest.main([str(folder), "-m", declared.marks, *options, *arguments])
    if code == pytest.ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    return int(code)
