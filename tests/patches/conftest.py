"""A patch is proved by a probe: a script that fails on the released package and passes on the patched one.

These tests run inside the image. ``RLHF_STACK_PRISTINE`` names a folder with the packages as upstream
released them; a probe's pristine side has it first on its path.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

SECONDS = 400
PREAMBLE = Path(__file__).with_name("preamble.py").read_text(encoding="utf-8")

Proof = Callable[[str, str], None]


@dataclass(frozen=True)
class Outcome:
    """How a probe ended on one side."""

    code: int
    output: str

    @property
    def last(self) -> str:
        """The last line that is not empty."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return lines[-1] if lines else ""


def run_both(probe: str, pristine: str, workspace: Path) -> tuple[Outcome, Outcome]:
    """Run ``probe`` on the pristine and on the patched packages, side by side."""
    running = []
    for side, first in (("pristine", [pristine]), ("patched", [])):
        folder = workspace / side
        folder.mkdir()
        (folder / "probe.py").write_text(f"{PREAMBLE}\n{probe}", encoding="utf-8")
        inherited = os.environ.get("PYTHONPATH")
        path = os.pathsep.join([*first, *([inherited] if inherited else [])])
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(folder / "probe.py")],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "RLHF_STACK_EVENTS": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        running.append(process)
    outcomes = []
    try:
        for process in running:
            output, _ = process.communicate(timeout=SECONDS)
            outcomes.append(Outcome(process.returncode, output))
    finally:
        for process in running:
            process.kill()
            process.wait()
    return outcomes[0], outcomes[1]


@pytest.fixture
def proves(capsys: pytest.CaptureFixture[str], record_property: Callable[[str, object], None]) -> Proof:
    """Return a check that a probe fails on the pristine package, for a given reason, and passes on ours.

    Both results are printed and recorded in the JUnit file, from which the catalogue takes them.
    """
    pristine = os.environ.get("RLHF_STACK_PRISTINE")
    if not pristine:
        pytest.skip("RLHF_STACK_PRISTINE names no folder with the pristine packages")

    def prove(probe: str, reason: str) -> None:
        with tempfile.TemporaryDirectory() as workspace:
            before, after = run_both(probe, pristine, Path(workspace))
        record_property("pristine", f"exit {before.code}: {before.last}")
        record_property("patched", f"exit {after.code}: {after.last}")
        with capsys.disabled():
            print(f"\n  pristine: exit {before.code}: {before.last}")
            print(f"  patched:  exit {after.code}: {after.last}")
        assert after.code == 0, f"the patched package fails:\n{after.output}"
        assert before.code != 0, f"the pristine package passes, so the patch is not needed:\n{before.output}"
        assert re.search(reason, before.output), f"the pristine package fails, but not so:\n{before.output}"

    return prove


@pytest.fixture
def cpu_only() -> None:
    """Skip in a GPU image, for patches that change nothing there."""
    devices = pytest.importorskip("rlhf_stack.accelerator.devices")
    if devices.is_gpu():
        pytest.skip("in this GPU image the patch does exactly what upstream does")
