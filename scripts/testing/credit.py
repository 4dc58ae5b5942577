"""A suite that passed on this machine is not repeated while its image and its tests are the same.

The last attempt of each suite, by image and tests, is kept with its evidence in the user's cache, where every
checkout of the machine finds it. What counts as a pass is the rule of publishing (`testing.acceptance`); a
failure anywhere on the machine ends it.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from scripts.locking import exclusive_lock
from scripts.matrix.suites import SUITES
from scripts.paths import CACHE
from scripts.testing import records
from scripts.testing.acceptance import undeclared_once, unproved
from scripts.testing.records import DIGITS, Record, Subject, Tally
from scripts.testing.suite_digest import suite_digest

SHARED = CACHE / "records"


def passed_before(
    tested: Subject, suite: str, roots: Sequence[Path] = records.ROOTS, shared: Path = SHARED
) -> Record | None:
    """Return and print the record for which a suite need not run, or None; ``roots[0]`` then has it."""
    if SUITES[suite].always:
        return None
    tests = suite_digest(suite)
    own = [record for record in records.read(tested.cell, tested.inputs, roots) if record.suite == suite]
    last = _last(tested, suite, tests, shared)
    if last and all(record.when < last.when for record in own):  # in another checkout
        if last.outcome == "failed" or records.altered_evidence(last, shared):
            return None
        evidence = records.folder_of(tested.cell, tested.inputs, shared) / "evidence"
        records.write(last, {name: (evidence / name).read_bytes() for name in last.evidence}, roots)
    runs = [record for record in records.history(tested.cell, roots) if record.suite == suite]
    if unproved(tested, suite, runs, roots[0], tests):
        return None
    found = [record for record in runs if record.image == tested.image][-1]
    print(
        f"{suite}: passed on this machine at {found.when:%Y-%m-%d %H:%M} UTC, "
        f"inputs {tested.inputs[:DIGITS]}, tests {tests[:DIGITS]}, record {records.file_name(found)}; "
        "run with --again to repeat",
        flush=True,
    )
    return found


@contextmanager
def recording(
    tested: Subject, suite: str, roots: Sequence[Path] = records.ROOTS, shared: Path = SHARED
) -> Iterator[Tally]:
    """Record a suite as `records.recording` does, for the other checkouts of this machine too.

    A skip that is hidden by the test's pass in another run, and not declared, is a failure.
    """
    tally = Tally()
    try:
        with records.recording(tested, suite, roots) as tally:
            yield tally
            for reason in undeclared_once(suite, tally):
                print(f"{suite}: one run skipped tests for a reason that it does not declare: {reason}")
                tally.code = tally.code or 1
    finally:
        if tally.record:
            try:
                _share(tally.record, tally, shared)
            except OSError as problem:
                print(
                    f"warning: the next run repeats {suite} in another checkout: {problem}", file=sys.stderr
                )


def _share(record: Record, tally: Tally, shared: Path) -> None:
    file = _file(record.cell, record.inputs, record.image, record.suite, record.tests, shared)
    with exclusive_lock(file.parent, "the writing of a record"):
        last = _stored(file)
        if last and last.when > record.when:  # it began later and ended earlier
            return
        (file.parent / "evidence").mkdir(exist_ok=True)
        for name, content in tally.evidence.items():
            (file.parent / "evidence" / name).write_bytes(content)
        unfinished = file.with_suffix(".unfinished")
        unfinished.write_bytes(records.encode(record))
        unfinished.rename(file)


def _last(tested: Subject, suite: str, tests: str, shared: Path) -> Record | None:
    """Return the last attempt of these tests on the image in any checkout of this machine."""
    record = _stored(_file(tested.cell, tested.inputs, tested.image, suite, tests, shared))
    wanted = (tested.cell, tested.inputs, tested.image, suite, tests)
    if not record or (record.cell, record.inputs, record.image, record.suite, record.tests) != wanted:
        return None
    return record


def _stored(file: Path) -> Record | None:
    try:
        return records.decode(file.read_bytes(), Record)
    except (OSError, msgspec.DecodeError):
        return None


def _file(cell: str, inputs: str, image: str, suite: str, tests: str, shared: Path) -> Path:
    image = image.removeprefix("sha256:")
    return records.folder_of(cell, inputs, shared) / f"{suite}-{image[:DIGITS]}-{tests[:DIGITS]}.json"
