"""The result of each test suite on an image: ``build/records/<image id>/<suite>.json``.

A record belongs to an image by its id, so a rebuilt image has none until its suites have run again.
Publishing requires those that `required` names; the catalogue shows all.
"""

import datetime
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
from junitparser import JUnitXml, Properties, TestCase

from scripts.errors import UserError
from scripts.git import DIRTY, revision
from scripts.matrix.load import Cell
from scripts.matrix.suites import SUITES
from scripts.paths import ROOT

RECORDS = ROOT / "build" / "records"


class Proof(msgspec.Struct, frozen=True):
    """A patch test (its file and its name) and the outcomes of its probe, without and with the patch."""

    file: str
    test: str
    pristine: str
    patched: str


class Record(msgspec.Struct, frozen=True):
    """One run of a suite. ``revision`` is that of the tests, ``seconds`` includes starting containers."""

    cell: str
    image: str
    suite: str
    outcome: Literal["passed", "failed"]
    passed: int
    failed: int
    skipped: int
    seconds: float
    revision: str
    when: datetime.datetime
    proofs: tuple[Proof, ...] = ()


@dataclass
class Tally:
    """The counts of a running suite; ``code`` is the worst exit code of its runs."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    code: int = 0
    proofs: list[Proof] = field(default_factory=list)

    def add(self, junit: Path, code: int) -> None:
        """Count one run of pytest by its JUnit file; without the file, by the exit code alone."""
        self.code = max(self.code, abs(code))
        if not junit.exists():
            self.code = self.code or 1
            return
        cases = [case for suite in JUnitXml.fromfile(str(junit)) for case in suite]
        failed = sum(case.is_failure or case.is_error for case in cases)
        skipped = sum(case.is_skipped for case in cases)
        self.failed += failed
        self.skipped += skipped
        self.passed += len(cases) - failed - skipped
        self.proofs += [proof for case in cases if (proof := _proof(case))]


def _proof(case: TestCase) -> Proof | None:
    """The outcomes that the fixture ``proves`` recorded as properties of a test case."""
    noted = case.child(Properties) or ()  # type: ignore[no-untyped-call]
    properties = {item.name: item.value for item in noted}
    if not {"pristine", "patched"} <= set(properties):
        return None
    file = f"tests/{(case.classname or '').replace('.', '/')}.py"
    return Proof(file, case.name or "", properties["pristine"], properties["patched"])


def required(cell: Cell) -> tuple[str, ...]:
    """The suites that a cell's image has to pass before it is published."""
    return tuple(name for name, suite in SUITES.items() if cell.accelerator.kind in suite.required_for)


def folder_of(image: str, records: Path = RECORDS) -> Path:
    """The folder of the records of an image, by its id."""
    return records / image.removeprefix("sha256:")


def write(record: Record, records: Path = RECORDS) -> Path:
    """Write a record; it replaces an older one of the same image and suite."""
    file = folder_of(record.image, records) / f"{record.suite}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".part")
    unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    unfinished.replace(file)
    return file


def read(image: str, records: Path = RECORDS) -> dict[str, Record]:
    """The records of an image by suite; a `UserError` names a file that is not a record."""
    found = {}
    for file in sorted(folder_of(image, records).glob("*.json")):
        try:
            found[file.stem] = msgspec.json.decode(file.read_bytes(), type=Record)
        except msgspec.DecodeError as error:
            raise UserError(
                f"{file}: not a test record ({error}); delete it and run the suite again"
            ) from None
    return found


def missing_records(cell: Cell, found: Mapping[str, Record]) -> list[str]:
    """Why the records ``found`` do not cover the required suites; empty if they do."""
    reasons = []
    for suite in required(cell):
        record = found.get(suite)
        if record is None:
            reasons.append(f"no record of the suite {suite}")
        elif record.outcome != "passed":
            reasons.append(f"the suite {suite} failed")
        elif not record.passed:
            reasons.append(f"all of the suite {suite} was skipped")
        elif record.revision.endswith(DIRTY):
            reasons.append(f"the suite {suite} ran from a dirty tree")
    return reasons


def now() -> datetime.datetime:
    """The current time in UTC, in whole seconds."""
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0)


@contextmanager
def recording(cell: str, image: str, suite: str, records: Path = RECORDS) -> Iterator[Tally]:
    """Time a suite and record its counts. An exception is a failure; an interrupt leaves no record."""
    tally, start, tests = Tally(), time.monotonic(), revision()
    try:
        yield tally
    except Exception:
        tally.code = tally.code or 1
        raise
    except BaseException:
        tally.code = -1
        raise
    finally:
        if tally.code >= 0:
            outcome: Literal["passed", "failed"] = "failed" if tally.code or tally.failed else "passed"
            record = Record(
                cell=cell,
                image=image,
                suite=suite,
                outcome=outcome,
                passed=tally.passed,
                failed=tally.failed,
                skipped=tally.skipped,
                seconds=round(time.monotonic() - start, 1),
                revision=tests,
                when=now(),
                proofs=tuple(tally.proofs),
            )
            write(record, records)
