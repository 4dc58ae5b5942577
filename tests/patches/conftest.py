"""A patch is proved by a probe: a script that fails without this patch alone and passes with all patches.

These tests run inside the image. ``RLHF_STACK_WITHOUT`` names a folder that has, for each patch, the files
as the rest of its series leaves them (`scripts.patches.leave_out`). One side of a probe has the installed
package with these files first on its path.
"""

import importlib.util
import json
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
CELL = Path("/etc/rlhf-stack/cell.json")
RANK = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)
IGNORED = re.compile(r"^Exception ignored in.*\nTraceback.*\n(?: .*\n)+.*\n?", re.MULTILINE)
FRAME = re.compile(r'^\s+File ".*", line \d+')

Proof = Callable[[str, str], None]


@dataclass(frozen=True)
class Outcome:
    """How a probe ended on one side."""

    code: int
    output: str

    @property
    def reason(self) -> str:
        """The final exception without its traceback, which echoes the probe; else the last line."""
        output = IGNORED.sub("", RANK.sub("", self.output))
        lines = [line for line in output.splitlines() if line.strip()]
        frames = [number for number, line in enumerate(lines) if FRAME.match(line)]
        if not frames:
            return lines[-1].strip() if lines else ""
        after = lines[frames[-1] + 1 :]
        while after and after[0].startswith(" "):
            after.pop(0)
        return "\n".join(after)

    def __str__(self) -> str:
        """The exit code and the first line of the reason."""
        return f"exit {self.code}: {self.reason.partition(chr(10))[0]}"


def link_package(installed: Path, replaced: Path, target: Path) -> None:
    """Fill ``target`` with links to the packages of ``installed``, with the files of ``replaced`` instead.

    Folders with a replaced file have no bytecode, which may be valid whatever the source is.
    """
    for folder, _, files in os.walk(replaced):
        relative = Path(folder).relative_to(replaced)
        (target / relative).mkdir(exist_ok=True)
        for name in files:
            (target / relative / name).write_bytes(Path(folder, name).read_bytes())
        if relative == Path():
            continue
        for path in (installed / relative).iterdir():
            if path.name != "__pycache__" and not (replaced / relative / path.name).exists():
                (target / relative / path.name).symlink_to(path)


def run_both(probe: str, replaced: Path, workspace: Path) -> tuple[Outcome, Outcome]:
    """Run ``probe`` side by side without a patch (``replaced`` are its files) and with all patches."""
    (package,) = (path.name for path in replaced.iterdir())
    spec = importlib.util.find_spec(package)
    assert spec
    assert spec.submodule_search_locations
    installed = Path(spec.submodule_search_locations[0]).parent
    running = []
    for side in ("without", "patched"):
        folder = workspace / side
        folder.mkdir()
        (folder / "probe.py").write_text(f"{PREAMBLE}\n{probe}", encoding="utf-8")
        path = [inherited] if (inherited := os.environ.get("PYTHONPATH")) else []
        if side == "without":
            packages = workspace / "packages"
            link_package(installed, replaced, packages)
            path.insert(0, str(packages))
        environment = {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(folder / "probe.py")],
            cwd=folder,
            env=os.environ | environment | {"RLHF_STACK_EVENTS": str(folder)},
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


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark."""
    config.addinivalue_line("markers", "patch(*ids): proves the one of these patches that the cell has")


@pytest.fixture
def patch(request: pytest.FixtureRequest) -> str:
    """The id of the patch that a test proves in this cell; without one the test is skipped."""
    ids = [one for mark in request.node.iter_markers("patch") for one in mark.args]
    packages = json.loads(CELL.read_text(encoding="utf-8"))["packages"]
    carried = tuple(f"{package['distribution']}/{package['version']}/" for package in packages)
    found: list[str] = [one for one in ids if one.startswith(carried)]
    if not found:
        pytest.skip(f"for {' or '.join(ids)}, which this cell does not have")
    assert len(found) == 1, f"a test proves one patch of a cell: {found}"
    return found[0]


@pytest.fixture
def proves(
    patch: str, capsys: pytest.CaptureFixture[str], record_property: Callable[[str, object], None]
) -> Proof:
    """Return a check that a probe fails without the patch alone, for a given reason, and passes with it.

    Both results are printed and recorded in the JUnit file, from which the catalogue takes them.
    """
    files = Path(os.environ["RLHF_STACK_WITHOUT"], patch)

    def prove(probe: str, reason: str) -> None:
        with tempfile.TemporaryDirectory() as workspace:
            before, after = run_both(probe, files, Path(workspace))
        record_property("patch", patch)
        record_property("without", str(before))
        record_property("patched", str(after))
        with capsys.disabled():
            print(f"\n  without {patch}: {before}\n  with all: {after}")
        assert after.code == 0, f"the patched package fails:\n{after.output}"
        assert before.code != 0, f"it passes without {patch}, which is not needed:\n{before.output}"
        assert re.search(reason, before.reason), f"it fails without {patch}, but not so:\n{before.output}"

    return prove


@pytest.fixture
def cpu_only() -> None:
    """Skip in a GPU image, for patches that change nothing there."""
    devices = pytest.importorskip("rlhf_stack.accelerator.devices")
    if devices.is_gpu():
        pytest.skip("in this GPU image the patch does exactly what upstream does")
