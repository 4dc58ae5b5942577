"""A suite is not repeated after a pass of the same tests on the same image, and only then."""

import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scripts.matrix.load import load
from scripts.testing import credit, records
from scripts.testing.acceptance import unproved
from scripts.testing.records import Record, Subject

ON = Subject(load().default, "sha256:" + "a" * 64, "d" * 64)
TESTS = "e" * 64
OTHER_IMAGE = Subject(load().default, "sha256:" + "b" * 64, "d" * 64)
JUNIT = '<testsuites><testsuite><testcase classname="a" name="b"/></testsuite></testsuites>'
FAILED = JUNIT.replace("/></testsuite>", "><failure>x</failure></testcase></testsuite>")


class Machine:
    """Two checkouts of the same commit, whose suites run an hour after one another."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.shared = folder, folder / "shared"
        self.tests, self.commit = TESTS, "c" * 40
        self.hour = records.now() - datetime.timedelta(days=1)
        monkeypatch.setattr(credit, "suite_digest", lambda _: self.tests)
        monkeypatch.setattr(records, "suite_digest", lambda _: self.tests)
        monkeypatch.setattr(records, "revision", lambda: self.commit)

    def run(
        self, monkeypatch: pytest.MonkeyPatch, checkout: str, junit: str = JUNIT, on: Subject = ON
    ) -> Record:
        """Run a suite in a checkout, and return its record."""
        self.hour += datetime.timedelta(hours=1)
        file = self.folder / "junit.xml"
        file.write_text(junit, encoding="utf-8")
        with monkeypatch.context() as later:
            later.setattr(records, "now", lambda: self.hour)
            with credit.recording(on, "image", (self.folder / checkout,), self.shared) as tally:
                tally.add(file, 0)
        assert tally.record
        return tally.record

    def credited(self, checkout: str, on: Subject = ON, suite: str = "image") -> Record | None:
        """Return the record for which a checkout does not run a suite."""
        return credit.passed_before(on, suite, (self.folder / checkout,), self.shared)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_a_pass_is_not_repeated_and_named_in_one_line(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert machine.credited("here") is None
    record = machine.run(monkeypatch, "here")
    assert machine.credited("here") == record
    [line] = capsys.readouterr().out.splitlines()
    assert line == (
        f"image: passed on this machine at {record.when:%Y-%m-%d %H:%M} UTC, "
        f"inputs {'d' * 12}, tests {'e' * 12}, record {records.file_name(record)}; run with --again to repeat"
    )


def test_a_pass_in_another_checkout_becomes_a_record_of_this_one_with_its_evidence(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = machine.run(monkeypatch, "there")
    assert machine.credited("here") == there
    assert machine.credited("here") == there
    [record] = records.read(ON.cell, ON.inputs, (machine.folder / "here",))
    assert records.altered_evidence(record, machine.folder / "here") is None


@pytest.mark.parametrize("checkout", ["here", "there"])
def test_a_later_failure_anywhere_on_the_machine_ends_it(
    checkout: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.run(monkeypatch, "here")
    machine.run(monkeypatch, checkout, FAILED)
    assert machine.credited("here") is None
    again = machine.run(monkeypatch, "there")
    assert machine.credited("here") == msgspec.structs.replace(again, attempt=3 if checkout == "here" else 2)


@pytest.mark.parametrize("of", [{"image": "sha256:" + "b" * 64}, {"inputs": "f" * 64}])
def test_another_image_is_tested(
    of: dict[str, Any], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.run(monkeypatch, "here")
    other = Subject(**{"cell": ON.cell, "image": ON.image, "inputs": ON.inputs, **of})
    assert machine.credited("here", other) is None
    assert machine.credited("there", other) is None


@pytest.mark.parametrize("checkout", ["here", "there"])
def test_changed_tests_run(checkout: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.run(monkeypatch, "here")
    machine.tests = "0" * 64
    assert machine.credited(checkout) is None


@pytest.mark.parametrize("checkout", ["here", "there"])
def test_what_publish_refuses_is_not_a_pass(
    checkout: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All skipped, from a dirty tree, or a month old."""
    skipped = JUNIT.replace("/></testsuite>", '><skipped message="no GPU">x</skipped></testcase></testsuite>')
    machine.run(monkeypatch, "here", skipped)
    assert machine.credited(checkout) is None
    machine.commit += "-dirty"
    machine.run(monkeypatch, "here")
    assert machine.credited(checkout) is None
    machine.commit = "c" * 40
    machine.hour -= datetime.timedelta(days=31)
    machine.run(monkeypatch, "here")
    assert machine.credited(checkout) is None


@pytest.mark.parametrize("damage", ["", "{}", None])
def test_a_damaged_cache_repeats_the_suite(
    damage: str | None, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that lost the evidence of a record."""
    machine.run(monkeypatch, "there")
    for file in (path for path in machine.shared.rglob("*") if path.suffix in (".json", ".xml")):
        if damage is None and file.suffix == ".xml":
            file.unlink()
        elif damage is not None:
            file.write_text(damage, encoding="utf-8")
    assert machine.credited("here") is None


def test_a_cache_that_cannot_be_written_is_reported_and_fails_no_suite(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.shared.write_text("a file where the folder should be", encoding="utf-8")
    record = machine.run(monkeypatch, "here")
    assert capsys.readouterr().err.startswith("warning: the next run repeats image in another checkout: ")
    assert machine.credited("here") == record


def test_a_suite_that_depends_on_the_day_always_runs(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = machine.run(monkeypatch, "here")
    shared = msgspec.structs.replace(record, suite="known-bad")
    records.write(shared, roots=(machine.folder / "here",))
    assert machine.credited("here", suite="known-bad") is None


def test_a_failure_on_this_image_is_not_covered_by_a_pass_on_another_one(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A suite can fail although each test passed: pytest crashed, or the image was rebuilt meanwhile."""
    passed = machine.run(monkeypatch, "here")
    failed = msgspec.structs.replace(passed, outcome="failed")
    elsewhere = machine.run(monkeypatch, "here", on=OTHER_IMAGE)
    wrong = unproved(ON, "image", [failed, elsewhere], machine.folder / "here", TESTS)
    assert wrong == "the suite image failed at its last attempt"
    assert unproved(ON, "image", [passed, elsewhere], machine.folder / "here", TESTS) is None


def test_a_run_that_began_earlier_and_ended_later_replaces_no_newer_failure(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.run(monkeypatch, "there", FAILED)
    machine.hour -= datetime.timedelta(hours=2)
    machine.run(monkeypatch, "elsewhere")
    last = credit._last(ON, "image", TESTS, machine.shared)
    assert last
    assert last.outcome == "failed"


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        ("odd", "failed"),
        ("this image has no OpenTelemetry", "passed"),
        ("measured once, as the image's own user", "passed"),
    ],
)
@pytest.mark.parametrize("passes_first", [True, False])
def test_a_skip_in_one_run_alone_has_to_be_declared(
    passes_first: bool, reason: str, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass of the same test in the other run hides it from the record."""
    monkeypatch.setattr(records, "revision", lambda: "c" * 40)
    files = [tmp_path / "passed.xml", tmp_path / "skipped.xml"]
    files[0].write_text(JUNIT, encoding="utf-8")
    skip = f'><skipped message="{reason}"/></testcase></testsuite>'
    files[1].write_text(JUNIT.replace("/></testsuite>", skip), encoding="utf-8")
    with credit.recording(ON, "image", (tmp_path / "here",), tmp_path / "shared") as tally:
        for file in files if passes_first else reversed(files):
            tally.add(file, 0)
    assert tally.record
    assert (tally.record.outcome, tally.record.passed, tally.record.skips) == (outcome, 1, {})
