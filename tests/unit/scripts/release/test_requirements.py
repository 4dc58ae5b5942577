"""What must be true before an image is published."""

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scripts.digests import sha256
from scripts.matrix.load import expand, load
from scripts.patches.series import series_of
from scripts.release import requirements
from scripts.testing import records
from scripts.testing.records import Record, Subject

CELL = next(cell for cell in expand(load()) if cell.is_default)
OTHER = next(cell for cell in expand(load()) if not cell.is_default)
IMAGE = Subject(CELL.id, "sha256:" + "1" * 64, "d" * 64)
JUNIT = """<testsuites><testsuite><testcase classname="a" name="b"/><testcase classname="a" name="c">
<skipped message="for vllm==0.4.2, which this cell does not have">x</skipped></testcase>
</testsuite></testsuites>"""
SUITE = "image"
DAY = datetime.timedelta(days=1)


def digest_of(suite: str) -> str:
    """Return the digest of a suite's tests."""
    return f"tests of {suite}"


class Made:
    """The history of a cell on whose image each required suite passed once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for suite in records.required(CELL):
            self.add(suite)

    def add(self, suite: str = SUITE, junit: str = JUNIT, **changes: Any) -> Record:
        """Add a record of a run with these results, with ``changes``."""
        file = self.root / "junit.xml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(junit if suite in ("image", "patches") else passed(1), encoding="utf-8")
        tally = records.Tally()
        tally.add(file, 0)
        record = Record(
            cell=CELL.id,
            image=IMAGE.image,
            inputs=IMAGE.inputs,
            suite=suite,
            tests=digest_of(suite),
            revision="a" * 40,
            when=records.now(),
            seconds=1.0,
            outcome="failed" if tally.failures else "passed",
            passed=tally.passed,
            failures=tally.failures,
            skips=tally.skips,
            evidence=tuple(tally.evidence),
        )
        return records.write(msgspec.structs.replace(record, **changes), tally.evidence, (self.root,))

    def replace(self, **changes: Any) -> None:
        """Replace the only record of the suite by one with ``changes``."""
        [file] = records.folder_of(CELL.id, IMAGE.inputs, self.root).glob(f"{SUITE}-1-*.json")
        file.unlink()
        self.add(**changes)

    def reasons(self) -> list[str]:
        """Return why the image is refused."""
        history = records.history(CELL.id, (self.root,))
        return requirements.suites(CELL, IMAGE, history, self.root, digest_of)


def passed(number: int, skipped: int = 0, reason: str = "") -> str:
    """Return the text of a JUnit file."""
    cases = [f'<testcase classname="a" name="{n}"/>' for n in range(number)]
    cases += [
        f'<testcase classname="s" name="{n}"><skipped message="{reason}">x</skipped></testcase>'
        for n in range(skipped)
    ]
    return f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>"


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Return a complete history."""
    return Made(tmp_path / "records")


FAILED = passed(1).replace("/>", "><failure>x</failure></testcase>")


def test_an_image_on_which_every_required_suite_passed_is_accepted(made: Made) -> None:
    assert made.reasons() == []


def test_a_suite_without_a_record_is_refused(made: Made) -> None:
    history = [record for record in records.history(CELL.id, (made.root,)) if record.suite != SUITE]
    [reason] = requirements.suites(CELL, IMAGE, history, made.root, digest_of)
    assert reason == "no record of the suite image on this image: run its tests"
    assert len(requirements.suites(CELL, IMAGE, [], made.root, digest_of)) == len(records.required(CELL))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda made: made.add(junit=FAILED), "the suite image failed at its last attempt"),
        (lambda made: made.add(junit=FAILED, image="sha256:2"), "the suite image failed at its last attempt"),
        (lambda made: made.add(junit=passed(0, 3, "no GPU")), "all of the suite image was skipped"),
        (
            lambda made: made.add(junit=passed(1, 999, "could not import 'ray'")),
            "skipped tests for a reason that it does not declare (\"could not import 'ray'\")",
        ),
        (lambda made: made.add(junit=passed(1, 1)), "a reason that it does not declare ('')"),
        (lambda made: made.add(revision="abc-dirty"), "the suite image ran from a dirty tree"),
        (
            lambda made: made.add(tests="other"),
            "the tests of the suite image have changed since aaaaaaaaaaaa",
        ),
        (lambda made: made.replace(when=records.now() - 31 * DAY), "not in the last 30 days"),
        (lambda made: made.add(when=records.now() + DAY), "not in the last 30 days"),
        (lambda made: made.add(passed=999), "does not support its record: its JUnit files have other counts"),
        (lambda made: made.add(evidence=()), "does not support its record: it has no evidence"),
    ],
)
def test_a_record_that_proves_nothing_is_refused(
    change: Callable[[Made], object], reason: str, made: Made
) -> None:
    change(made)
    [found] = made.reasons()
    assert reason in found


@pytest.mark.parametrize("of", [{"image": "sha256:2"}, {"inputs": "e" * 64}, {"cell": OTHER.id}])
def test_records_of_another_image_or_cell_or_of_other_inputs_are_refused(
    of: dict[str, str], made: Made
) -> None:
    history = [msgspec.structs.replace(record, **of) for record in records.history(CELL.id, (made.root,))]
    reasons = requirements.suites(CELL, IMAGE, history, made.root, digest_of)
    assert len(reasons) == len(records.required(CELL))
    assert all("on this image" in reason for reason in reasons)


def test_fewer_passed_tests_than_before_are_refused_unless_the_tests_changed(made: Made) -> None:
    """On any image of the cell."""
    earlier = made.add(inputs="e" * 64, junit=passed(5))
    assert made.reasons() == [
        "only 1 tests of the suite image passed, and 5 of the same tests before: run its tests"
    ]
    made.add(inputs="e" * 64, junit=passed(9), tests="older")
    assert f"and {earlier.passed} of" in made.reasons()[0]
    made.add(junit=passed(5))
    assert made.reasons() == []


def test_a_changed_junit_file_is_refused(made: Made) -> None:
    record = made.add()
    folder = records.folder_of(CELL.id, IMAGE.inputs, made.root)
    (folder / "evidence" / record.evidence[0]).write_text(passed(1), encoding="utf-8")
    assert all("evidence" in reason and "was changed" in reason for reason in made.reasons())
    assert made.reasons()


def test_support_and_reviews_have_dates() -> None:
    today = CELL.support.since
    assert requirements.dates(CELL, today) == []
    for day in (CELL.support.since - DAY, CELL.support.until + DAY):
        assert requirements.dates(CELL, day)[0].startswith("it is supported from")
    review = min(patch.review_by for series in series_of(CELL) for patch in series.patches)
    assert any("Review-By" in reason for reason in requirements.dates(CELL, review + DAY))


def test_lint_and_unit_must_have_passed_on_the_commit(tmp_path: Path) -> None:
    junit = passed(1).encode()
    evidence = tmp_path / records.CHECKOUT / ("a" * records.DIGITS) / "evidence" / f"{sha256(junit)}.xml"
    evidence.parent.mkdir(parents=True)
    evidence.write_bytes(junit)

    def record(suite: str, **changes: Any) -> Record:
        return Record(
            evidence=(evidence.name,),
            cell=records.CHECKOUT,
            image="",
            inputs="a" * 40,
            suite=suite,
            tests="",
            revision="a" * 40,
            when=records.now(),
            seconds=1.0,
            outcome="passed",
            passed=1,
            **changes,
        )

    lint, unit = record("lint"), record("unit")
    assert requirements.checkout("a" * 40, [lint, unit], tmp_path) == []
    assert requirements.checkout("a" * 40, [lint], tmp_path) == [
        "unit did not pass on aaaaaaaaaaaa: run python -m scripts suites --checks"
    ]
    for wrong in (
        {"outcome": "failed"},
        {"inputs": "a" * 40 + "-dirty"},
        {"inputs": "b" * 40},
        {"passed": 0},
    ):
        found = [msgspec.structs.replace(lint, **wrong), unit]
        assert len(requirements.checkout("a" * 40, found, tmp_path)) == 1
    again = msgspec.structs.replace(lint, attempt=2, outcome="failed")
    assert len(requirements.checkout("a" * 40, [lint, again, unit], tmp_path)) == 1
    evidence.write_bytes(passed(2).encode())
    assert len(requirements.checkout("a" * 40, [lint, unit], tmp_path)) == 2
