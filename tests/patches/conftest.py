"""A patch is proved by a probe: a script that fails without this patch alone and passes with all patches.

These tests run inside the image. Each side of a probe has links to the installed package first on its path:
one with the files as the rest of the series leaves them (`scripts.patches.leave_out`), the other with the
installed ones and marks in them (the fixture ``marked`` of tests/conftest.py).
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import pytest

SECONDS = 400
STUBS = "stubs"  # the file in which preamble.py notes what a probe replaces
PREAMBLE = Path(__file__).with_name("preamble.py").read_text(encoding="utf-8")
CELL = Path("/etc/rlhf-stack/cell.json")
RANK = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)
IGNORED = re.compile(r"^Exception ignored in.*\nTraceback.*\n(?: .*\n)+.*\n?", re.MULTILINE)
FRAME = re.compile(r'^\s+File ".*", line \d+')

Proof = Callable[[str, str], None]


@dataclass(frozen=True)
class Outcome:
    """How a probe ended on one side, and what it replaced with stubs."""

    code: int
    output: str
    stubs: tuple[str, ...] = ()

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


def run_both(probe: str, sides: Mapping[Path, Path], executed: Path) -> tuple[Outcome, ...]:
    """Run ``probe`` side by side, in each folder of ``sides``, with its packages first on the path."""
    running = []
    for folder, packages in sides.items():
        folder.mkdir()
        (folder / "probe.py").write_text(f"{PREAMBLE}\n{probe}", encoding="utf-8")
        (folder / STUBS).touch()
        path = [str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONSAFEPATH": "1",
            "RLHF_STACK_EVENTS": str(folder),
            "RLHF_STACK_EXECUTED": str(executed),
        }
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(folder / "probe.py")],
            cwd=folder,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        running.append((process, folder / STUBS))
    outcomes = []
    try:
        for process, stubs in running:
            output, _ = process.communicate(timeout=SECONDS)
            names = sorted(set(stubs.read_text(encoding="utf-8").splitlines()))
            outcomes.append(Outcome(process.returncode, output, tuple(names)))
    finally:
        for process, _ in running:
            process.kill()
            process.wait()
    return tuple(outcomes)


def digest(proofs: Path, patch: str, probe: str, reason: str) -> str:
    """The digest of what decides how a probe ends without its patch, but for the runtime of the image."""
    variables = {name: value for name, value in os.environ.items() if name != "HOSTNAME"}
    parts = [(proofs / "digest").read_text(encoding="utf-8"), patch, PREAMBLE, probe, reason]
    return hashlib.sha256(json.dumps([*parts, variables], sort_keys=True).encode()).hexdigest()


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark."""
    config.addinivalue_line("markers", "patch(*ids): proves the one of these patches that the cell has")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Note in the JUnit file, also of a skipped test, which patch of this cell it proves."""
    packages = json.loads(CELL.read_text(encoding="utf-8"))["packages"]
    carried = tuple(f"{package['distribution']}/{package['version']}/" for package in packages)
    for item in items:
        ids = [one for mark in item.iter_markers("patch") for one in mark.args]
        found = [one for one in ids if one.startswith(carried)]
        assert len(found) <= 1, f"a test proves one patch of a cell: {found}"
        if ids and not found:
            item.add_marker(pytest.mark.skip(f"for {' or '.join(ids)}, which this cell does not have"))
        item.user_properties += [("patch", one) for one in found]


@pytest.fixture
def proves(
    request: pytest.FixtureRequest,
    proofs: Path,
    marked: Path,
    linked: Callable[[Path, Path], None],
    capsys: pytest.CaptureFixture[str],
    record_property: Callable[[str, object], None],
) -> Proof:
    """Return a check that a probe fails without the patch alone, for a given reason, and passes with it.

    Both results are printed and recorded in the JUnit file, from which the catalogue takes them.
    """
    patch = str(dict(request.node.user_properties)["patch"])

    def prove(probe: str, reason: str) -> None:
        known = proofs / "known" / f"{digest(proofs, patch, probe, reason)}.json"
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            sides = {folder / "patched": marked}
            if not known.exists():
                linked(proofs / "without" / patch, folder / "packages")
                sides[folder / "without"] = folder / "packages"
            after, *others = run_both(probe, sides, proofs / "executed")
        if others:
            [before], when = others, ""
        else:
            before = Outcome(**json.loads(known.read_text(encoding="utf-8")))
            when = f" (on {date.fromtimestamp(known.stat().st_mtime)})"
        record_property("without", f"{before}{when}")
        record_property("patched", str(after))
        record_property("stubs", json.dumps(after.stubs))
        with capsys.disabled():
            print(f"\n  without {patch}: {before}{when}\n  with all: {after}")
        assert after.code == 0, f"the patched package fails:\n{after.output}"
        assert before.code != 0, f"it passes without {patch}, which is not needed:\n{before.output}"
        assert re.search(reason, before.reason), f"it fails without {patch}, but not so:\n{before.output}"
        if not when:
            known.write_text(json.dumps({"code": before.code, "output": before.output}), encoding="utf-8")

    return prove


@pytest.fixture
def cpu_only() -> None:
    """Skip in a GPU image, for patches that change nothing there."""
    devices = pytest.importorskip("rlhf_stack.accelerator.devices")
    if devices.is_gpu():
        pytest.skip("in this GPU image the patch does exactly what upstream does")
