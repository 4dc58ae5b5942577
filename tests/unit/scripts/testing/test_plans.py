"""What runs for the default cell, for a submission and for a release."""

import functools
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from scripts.git import revision
from scripts.matrix.load import expand, find, load
from scripts.release import requirements
from scripts.testing import plans, records, side_by_side
from scripts.testing.plans import Plan
from scripts.testing.records import required
from scripts.testing.side_by_side import Job, Lanes

MATRIX = load()
JUNIT = '<testsuites><testsuite><testcase classname="a" name="b"/></testsuite></testsuites>'


def builds(plan: Plan) -> list[str]:
    return [command[-1] for command in plan.commands if "build" in command]


def test_the_default_cell_is_checked_built_and_tested() -> None:
    plan = plans.for_default(MATRIX)
    assert [command[-1] for command in plan.commands] == ["lint", "tests/unit", MATRIX.default]
    assert {job.suite for job in plan.jobs} == {"patches", "network", "cluster", "image", "layers"}


def test_a_submission_runs_the_ci_suites_of_cells() -> None:
    plan = plans.for_submission(MATRIX)
    cells = [cell for cell in expand(MATRIX) if cell.ci_suites]
    assert {cell.id for cell in cells} <= set(builds(plan))
    assert {Job(suite, cell.id) for cell in cells for suite in cell.ci_suites} <= set(plan.jobs)


def test_a_release_runs_every_required_suite() -> None:
    """Cells of vendors' sources are replaced by their stand-ins; the registry suite runs alone, then hip."""
    plan = plans.for_release(MATRIX)
    cells = [cell for cell in expand(MATRIX) if not cell.sources]
    assert {Job(suite, cell.id) for cell in cells for suite in required(cell)} <= {*plan.jobs, *plan.alone}
    assert plan.alone[0] == Job("registry", MATRIX.default)
    assert {job.suite for job in plan.alone[1:]} == {"hip"}
    compiled = [find(MATRIX, job.cell) for job in plan.alone[1:]]
    assert {cell.accelerator.kind for cell in compiled} == {"rocm"}
    proved = [variant.name for variant in MATRIX.variants if variant.compile_proof]
    assert [cell.variant for cell in compiled] == proved
    assert {job.cell for job in plan.jobs} == set(builds(plan))
    assert not {cell.id for cell in expand(MATRIX) if cell.sources} & set(builds(plan))


@pytest.mark.parametrize(("code", "outcome"), [(0, "passed"), (1, "failed")])
def test_lint_and_unit_are_recorded_for_the_commit(
    code: int, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = functools.partial(records.recording, roots=(tmp_path,))
    monkeypatch.setattr(records, "recording", recording)

    def start(command: plans.Command, _: int) -> subprocess.Popen[str]:
        for word in command:
            if word.startswith("--junitxml="):
                Path(word.partition("=")[2]).write_text(JUNIT, encoding="utf-8")
        program = f"print('checked'); raise SystemExit({code})"
        return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)

    monkeypatch.setattr(side_by_side, "_start", start)
    plans.run(Plan(plans.CHECKS, ()))
    found = records.read(records.CHECKOUT, revision(), (tmp_path,))
    assert [(record.suite, record.outcome) for record in found] == [("lint", outcome), ("unit", outcome)]
    assert {record.inputs for record in found} == {revision()}
    [printed] = found[0].evidence
    folder = records.folder_of(records.CHECKOUT, revision(), tmp_path)
    assert (folder / "evidence" / printed).read_text(encoding="utf-8") == "checked\n"
    assert bool(requirements.checkout(revision(), found, tmp_path)) == bool(code)


@pytest.mark.parametrize(("fails", "ran"), [("", "abc"), ("a", "a"), ("b", "ab"), ("c", "abc")])
def test_a_plan_ends_with_its_first_part_that_fails(
    fails: str, ran: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def command(name: str) -> tuple[str, ...]:
        return (sys.executable, "-c", f"print('ran {name}'); exit({int(name == fails)})")

    monkeypatch.setattr(Job, "command", lambda job, _: list(command(job.suite)))
    code = plans.run(Plan((command("a"),), (Job("b", "cell"),), (Job("c", "cell"),)))
    assert code == bool(fails)
    printed = capfd.readouterr().out.splitlines()
    assert "".join(line[-1] for line in printed if line.rpartition("| ")[2].startswith("ran ")) == ran


def test_the_unit_tests_run_beside_the_other_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that fails ends its own part alone."""
    both = threading.Barrier(2, timeout=20)
    ran = []

    def run(_: Lanes, command: plans.Command, name: str) -> int:
        ran.append(name)
        if command in (plans.LINT, plans.UNIT):
            both.wait()
        return int(command == plans.LINT)

    monkeypatch.setattr(plans, "_recorded", lambda lanes, command: run(lanes, command, command[-1]))
    assert plans.run(Plan((plans.LINT, plans.UNIT, ("build", "a cell")), ())) == 1
    assert sorted(ran) == ["lint", "tests/unit"]
