"""Whether the records of a suite prove that it passes on an image: the rule of publishing and of `credit`."""

import datetime
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from scripts.git import DIRTY
from scripts.matrix.suites import SUITES
from scripts.testing import records
from scripts.testing.records import Record, Subject, Tally

MAX_AGE = datetime.timedelta(days=30)


def unproved(image: Subject, suite: str, runs: Sequence[Record], root: Path, tests: str) -> str | None:
    """Return why the last record of a suite on an image does not prove that it passes, or None.

    ``runs`` are its records on all images of the cell, ``root`` has their evidence, and ``tests`` is the
    digest of the suite's tests in this checkout.
    """
    return next(_wrong(image, suite, runs, root, tests), None)


def undeclared(suite: str, reasons: Iterable[str]) -> list[str]:
    """Return the reasons for skips that a suite does not declare."""
    return [
        reason for reason in reasons if not any(re.fullmatch(known, reason) for known in SUITES[suite].skips)
    ]


def undeclared_once(suite: str, tally: Tally) -> list[str]:
    """Return the reasons, not declared either, for which only tests were skipped that passed in another run.

    The record does not have these.
    """
    once = sorted(tally.skip_reasons - tally.skips.keys())
    known = SUITES[suite].skips_once
    return [
        reason for reason in undeclared(suite, once) if not any(re.fullmatch(one, reason) for one in known)
    ]


def _wrong(image: Subject, suite: str, runs: Sequence[Record], root: Path, tests: str) -> Iterator[str]:
    on_inputs = [record for record in runs if record.inputs == image.inputs]
    on_image = [record for record in on_inputs if record.image == image.image]
    if not on_image:
        yield f"no record of the suite {suite} on this image"
        return
    record = on_image[-1]
    if {record.outcome, on_inputs[-1].outcome} != {"passed"}:
        yield f"the suite {suite} failed at its last attempt"
    if not record.passed:
        yield f"all of the suite {suite} was skipped"
    if record.revision.endswith(DIRTY):
        yield f"the suite {suite} ran from a dirty tree"
    if record.tests != tests:
        yield f"the tests of the suite {suite} have changed since {record.revision[: records.DIGITS]}"
    if not datetime.timedelta() <= records.now() - record.when <= MAX_AGE:
        yield f"the suite {suite} ran on {record.when:%Y-%m-%d}, not in the last {MAX_AGE.days} days"
    for reason in undeclared(suite, record.skips):
        yield f"the suite {suite} skipped tests for a reason that it does not declare ({reason!r})"
    best = max(other.passed for other in runs if other.tests == record.tests)
    if record.passed < best:
        yield f"only {record.passed} tests of the suite {suite} passed, and {best} of the same tests before"
    if altered := records.altered_evidence(record, root):
        yield f"the evidence of the suite {suite} does not support its record: {altered}"
