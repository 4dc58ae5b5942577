"""The record of a suite's run on an image, and the records that publishing requires."""

import datetime
from pathlib import Path

import msgspec
import pytest

from scripts.errors import UserError
from scripts.matrix.load import Cell, expand, load
from scripts.matrix.suites import SUITES
from scripts.testing import records

CELL = next(cell for cell in expand(load()) if cell.is_default)
IMAGE = "sha256:" + "a" * 64
JUNIT = """<testsuites><testsuite tests="4">
<testcase classname="patches.test_flash_attn" name="test_a"><properties>
<property name="pristine" value="exit 1: ModuleNotFoundError: no"/>
<property name="patched" value="exit 0: ok"/>
</properties></testcase>
<testcase classname="patches.test_x" name="test_b"><failure message="no">x</failure></testcase>
<testcase classname="patches.test_x" name="test_c"><error message="no">x</error></testcase>
<testcase classname="patches.test_x" name="test_d"><skipped message="no GPU">x</skipped></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def junit(tmp_path: Path) -> Path:
    """A JUnit file as pytest writes it: passed, failed, error, skipped."""
    file = tmp_path / "junit.xml"
    file.write_text(JUNIT, encoding="utf-8")
    return file


def record(cell: Cell, suite: str) -> records.Record:
    """A run in which all passed."""
    now = datetime.datetime.now(datetime.UTC)
    return records.Record(cell.id, IMAGE, suite, "passed", 3, 0, 1, 1.5, "abc", now)


def complete(cell: Cell) -> dict[str, records.Record]:
    """A record of each suite that the cell needs."""
    return {suite: record(cell, suite) for suite in records.required(cell)}


def test_a_run_is_counted_by_its_junit_file(junit: Path) -> None:
    tally = records.Tally()
    tally.add(junit, 1)
    tally.add(junit, 0)
    assert (tally.passed, tally.failed, tally.skipped, tally.code) == (2, 4, 2, 1)
    proof = records.Proof(
        "tests/patches/test_flash_attn.py", "test_a", "exit 1: ModuleNotFoundError: no", "exit 0: ok"
    )
    assert tally.proofs == [proof, proof]


def test_a_run_that_ended_before_it_could_count_is_a_failure(tmp_path: Path) -> None:
    with records.recording("cell", IMAGE, "image", tmp_path) as tally:
        tally.add(tmp_path / "absent.xml", 0)
    assert records.read(IMAGE, tmp_path)["image"].outcome == "failed"


def test_a_passed_suite_is_recorded(junit: Path, tmp_path: Path) -> None:
    junit.write_text(
        "<testsuites><testsuite><testcase classname='a' name='b'/></testsuite></testsuites>", encoding="utf-8"
    )
    with records.recording("cell", IMAGE, "image", tmp_path) as tally:
        tally.add(junit, 0)
    found = records.read(IMAGE, tmp_path)["image"]
    assert (found.outcome, found.passed, found.failed, found.cell, found.image) == (
        "passed",
        1,
        0,
        "cell",
        IMAGE,
    )
    assert found.when.tzinfo is not None


def test_an_error_is_recorded_as_a_failure_and_raised(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no space"), records.recording("cell", IMAGE, "demo", tmp_path):
        raise UserError("no space")
    assert records.read(IMAGE, tmp_path)["demo"].outcome == "failed"


def test_an_interrupted_suite_leaves_no_record(tmp_path: Path) -> None:
    """An earlier record stays."""
    with pytest.raises(KeyboardInterrupt), records.recording("cell", IMAGE, "demo", tmp_path):
        raise KeyboardInterrupt
    assert records.read(IMAGE, tmp_path) == {}


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    file = records.write(record(CELL, "image"), tmp_path)
    file.write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match=r"image\.json: not a test record .* delete it"):
        records.read(IMAGE, tmp_path)


@pytest.mark.parametrize("cell", expand(load()), ids=lambda cell: cell.id)
def test_records_of_all_required_suites_are_enough(cell: Cell) -> None:
    assert records.missing_records(cell, complete(cell)) == []
    assert records.missing_records(cell, {}) == [
        f"no record of the suite {s}" for s in records.required(cell)
    ]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"outcome": "failed"}, "the suite image failed"),
        ({"passed": 0}, "all of the suite image was skipped"),
        ({"revision": "abc-dirty"}, "the suite image ran from a dirty tree"),
    ],
)
def test_a_record_that_proves_nothing_is_reported(change: dict[str, object], reason: str) -> None:
    found = complete(CELL)
    found["image"] = msgspec.structs.replace(found["image"], **change)
    assert records.missing_records(CELL, found) == [reason]


def test_a_cpu_cell_requires_every_suite_that_publishing_requires() -> None:
    assert set(records.required(CELL)) == {name for name, suite in SUITES.items() if suite.required_for}
