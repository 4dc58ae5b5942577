"""What must be true before an image is published: results of suites, dates, checks, and the catalogue."""

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from scripts.matrix.load import Cell
from scripts.patches.check import existing_tests, expired
from scripts.patches.series import series_of
from scripts.release.facts import Facts, is_current
from scripts.testing import records
from scripts.testing.acceptance import unproved
from scripts.testing.records import Record, Subject
from scripts.testing.suite_digest import suite_digest


def suites(
    cell: Cell,
    image: Subject,
    history: Sequence[Record],
    root: Path = records.RECORDS,
    digest: Callable[[str], str] = suite_digest,
) -> list[str]:
    """Return why the records do not prove that every required suite passed on the image; empty if they do.

    ``history`` are the records of all images of the cell, ``root`` has their evidence, and ``digest`` returns
    the digest of a suite's tests in this checkout. There is at most one line for each suite.
    """
    reasons = []
    for suite in records.required(cell):
        runs = [record for record in history if record.suite == suite and record.cell == image.cell]
        if wrong := unproved(image, suite, runs, root, digest(suite)):
            reasons.append(f"{wrong}: run its tests")
    return reasons


def dates(cell: Cell, today: datetime.date) -> list[str]:
    """Return why the cell may not be published on this day: its support, and the reviews of its patches."""
    reasons = []
    if not cell.support.since <= today <= cell.support.until:
        reasons.append(f"it is supported from {cell.support.since} to {cell.support.until}")
    return reasons + [wrong for s in series_of(cell) for wrong in expired(s, today, existing_tests())]


def checkout(revision: str, found: Iterable[Record], root: Path = records.RECORDS) -> list[str]:
    """Return why lint and the unit tests are not known to pass on a commit, from the records of checkouts.

    ``root`` has their evidence.
    """
    last = {record.suite: record for record in found if record.inputs == revision}
    altered = {check: records.altered_evidence(record, root) for check, record in last.items()}
    return [
        f"{check} did not pass on {revision[: records.DIGITS]}: run python -m scripts suites --checks"
        for check in records.CHECKS
        if check not in last or last[check].outcome != "passed" or not last[check].passed or altered[check]
    ]


def catalogued(cell: Cell, image: str, known: Mapping[str, Facts]) -> list[str]:
    """Return a line unless the catalogue is about the image of a cell and the sources of this checkout."""
    if cell.id not in known or known[cell.id].image != image:
        return [
            f"{cell.id}: the catalogue is about another image: run python -m scripts catalogue, and commit"
        ]
    if not is_current(cell, known[cell.id]):
        return [f"{cell.id}: the catalogue calls it not verified yet: build it, and test it"]
    return []
