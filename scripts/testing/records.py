"""The records of the suites' runs, which prove every figure of the catalogue and every published image.

``build/records/<cell>/<inputs>/<suite>-<attempt>-<sha256>.json`` is one attempt, with the first 12 digits of
the inputs digest and of its own; ``evidence/<sha256>`` next to it is what was counted, such as a JUnit file.
Records are only ever added. Attempts are numbered and a record's name has its digest, so that one
that was changed, renamed or removed from between others is an error. ``python -m scripts catalogue`` copies
the records of the measured images to ``images/records``, without evidence, where they are committed.

Digests protect against mistakes, not against somebody who writes a wrong record together with its digest.
"""

import datetime
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
from docker.models.images import Image
from junitparser import JUnitXml, JUnitXmlError, Properties, Skipped, TestCase

from scripts.digests import sha256, sha256_file
from scripts.errors import UserError
from scripts.git import revision
from scripts.images.inputs import INPUTS, NAMESPACE
from scripts.locking import exclusive_lock
from scripts.matrix.load import Cell
from scripts.matrix.suites import SUITES
from scripts.paths import ROOT
from scripts.testing.suite_digest import suite_digest

T = TypeVar("T")

RECORDS = ROOT / "build" / "records"
COMMITTED = ROOT / "images" / "records"
ROOTS = (RECORDS, COMMITTED)
CHECKOUT = (
    "checkout"  # in the place of a cell, with the commit in the place of the inputs digest, for `CHECKS`
)
CHECKS = ("lint", "unit")
DIGITS = 12  # of digests in names
SKIPPED, PASSED, FAILED = 0, 1, 2


class Proof(msgspec.Struct, frozen=True, omit_defaults=True):
    """A patch test (its file and name) and the outcomes of its probe, without one patch and with all.

    ``patch`` is the id of that patch. Without one it is an older record, about the released package.
    ``stubs`` are what the probe replaced. A test that was ``skipped`` for a reason has no outcomes.
    """

    file: str
    test: str
    without: str = msgspec.field(name="pristine")  # as in older records
    patched: str
    patch: str = ""
    stubs: tuple[str, ...] = ()
    skipped: str = ""


class Executed(msgspec.Struct, frozen=True):
    """How many changes a patch has (`patches.changes`), and those that no test executed, by file and line."""

    changes: int
    missed: tuple[str, ...]


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run of a suite.

    ``image`` is the image's id, ``inputs`` the digest of its inputs, ``tests`` that of the suite's tests,
    ``revision`` the commit of the checkout, ``when`` the start. ``failures`` are the names of the failed
    tests, ``skips`` the number of tests by the reason why they were skipped, ``evidence`` names of files.
    ``executed`` has, by the ids of patches, which of their changes the suite executed; most suites note none.
    """

    cell: str
    image: str
    inputs: str
    suite: str
    tests: str
    revision: str
    when: datetime.datetime
    seconds: float
    outcome: Literal["passed", "failed"]
    passed: int
    failures: tuple[str, ...] = ()
    skips: dict[str, int] = {}
    evidence: tuple[str, ...] = ()
    proofs: tuple[Proof, ...] = ()
    attempt: int = 1
    executed: dict[str, Executed] | msgspec.UnsetType = msgspec.UNSET

    @property
    def skipped(self) -> int:
        """The number of skipped tests."""
        return sum(self.skips.values())


@dataclass(frozen=True)
class Subject:
    """What a suite runs on: the cell, the image's id and the digest of its inputs."""

    cell: str
    image: str
    inputs: str


@dataclass
class Tally:
    """The tests of a running suite, each once with its worst outcome, also if the suite runs several times.

    A test that passed in one run and was skipped in another has passed; ``skip_reasons`` are those of all
    runs. ``code`` is the worst exit code of the runs. ``evidence`` are the files that were counted, by name,
    ``record`` what was written at the end.
    """

    outcomes: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    skip_reasons: set[str] = field(default_factory=set)
    evidence: dict[str, bytes] = field(default_factory=dict)
    code: int = 0
    proofs: list[Proof] = field(default_factory=list)
    executed: dict[str, Executed] = field(default_factory=dict)
    record: Record | None = None

    def add(self, junit: Path, code: int) -> None:
        """Count one run of pytest by its JUnit file; a run without a readable one has failed."""
        self.code = max(self.code, abs(code))
        if not junit.exists():
            self.code = self.code or 1
            return
        try:
            cases = [case for suite in JUnitXml.fromfile(str(junit)) for case in suite]
        except (SyntaxError, JUnitXmlError):  # the parser's errors are syntax errors
            self.code = self.code or 1
            self.attach(junit.read_bytes(), ".broken")
            return
        self.attach(junit.read_bytes(), junit.suffix)
        for case in cases:
            failed = case.is_failure or case.is_error
            outcome = FAILED if failed else SKIPPED if case.is_skipped else PASSED
            self.count(f"{case.classname}::{case.name}", outcome, _reason(case))
            self.proofs += [proof] if (proof := _proof(case)) else []

    def add_marks(self, marks: Mapping[str, Mapping[str, Sequence[str]]], noted: Path) -> None:
        """Count the changes of which all ``marks`` are in ``noted``, a line each; keep it as evidence."""
        lines = set(noted.read_text(encoding="utf-8").splitlines())
        self.attach("".join(f"{line}\n" for line in sorted(lines)).encode(), ".txt")
        for patch, changes in marks.items():
            missed = [change for change, of_change in changes.items() if not lines.issuperset(of_change)]
            self.executed[patch] = Executed(len(changes), tuple(missed))

    def count(self, test: str, outcome: int, reason: str = "") -> None:
        """Count a test: `PASSED`, `FAILED`, or `SKIPPED` for a reason."""
        self.outcomes[test] = max(outcome, self.outcomes.get(test, SKIPPED))
        self.reasons.setdefault(test, reason)
        if outcome == SKIPPED:
            self.skip_reasons.add(reason)

    def attach(self, content: bytes, suffix: str) -> None:
        """Keep a file as evidence."""
        self.evidence[f"{sha256(content)}{suffix}"] = content

    @property
    def passed(self) -> int:
        """The number of tests that passed."""
        return sum(outcome == PASSED for outcome in self.outcomes.values())

    @property
    def failures(self) -> tuple[str, ...]:
        """The names of the tests that failed."""
        return tuple(sorted(test for test, outcome in self.outcomes.items() if outcome == FAILED))

    @property
    def skips(self) -> dict[str, int]:
        """The number of skipped tests by reason."""
        skipped = [self.reasons[test] for test, outcome in self.outcomes.items() if outcome == SKIPPED]
        return {reason: skipped.count(reason) for reason in sorted(set(skipped))}


def _reason(case: TestCase) -> str:
    """Why a test was skipped. Of a skipped file, pytest writes path, line and reason as a tuple."""
    for result in case.result:
        if isinstance(result, Skipped):
            of_file = re.search(r"[\"']Skipped: (.*)[\"']\)$", result.text or "", re.DOTALL)
            return " ".join((of_file[1] if of_file else result.message or "").split())
    return ""


def _proof(case: TestCase) -> Proof | None:
    """What tests/patches/conftest.py recorded as properties of a test case."""
    noted = case.child(Properties) or ()  # type: ignore[no-untyped-call]
    given = {item.name: item.value for item in noted}
    if "patch" not in given or not (case.is_skipped or "without" in given):
        return None
    return Proof(
        f"tests/{(case.classname or '').replace('.', '/')}.py",
        case.name or "",
        given.get("without", ""),
        given.get("patched", ""),
        given["patch"],
        tuple(json.loads(given.get("stubs", "[]"))),
        _reason(case),
    )


def required(cell: Cell) -> tuple[str, ...]:
    """The suites that a cell's image has to pass before it is published."""
    return tuple(
        name
        for name, suite in SUITES.items()
        if cell.accelerator.kind in suite.required_for or (suite.of_default and cell.is_default)
    )


def subject(cell: Cell, image: Image) -> Subject:
    """What is tested with an image of the cell; a `UserError` if it is an image of another one."""
    labels = image.labels
    if labels.get(f"{NAMESPACE}.cell") != cell.id or not labels.get(INPUTS):
        raise UserError(f"{cell.tag} is not an image of {cell.id} with the digest of its inputs: build it")
    return Subject(cell.id, str(image.id), labels[INPUTS])


def checkout() -> Subject:
    """What lint and the unit tests check: the commit that is checked out."""
    return Subject(CHECKOUT, "", revision())


def folder_of(cell: str, inputs: str, root: Path = RECORDS) -> Path:
    """The folder of the records of all images of a cell that were built from the same inputs."""
    return root / cell / inputs[:DIGITS]


def file_name(record: Record) -> str:
    """The name of a record's file."""
    return f"{record.suite}-{record.attempt}-{sha256(encode(record))[:DIGITS]}.json"


def decode(content: bytes, kind: type[T]) -> T:
    """Return the ``kind`` that JSON holds; `msgspec.DecodeError` also for bytes that are not UTF-8."""
    try:
        return msgspec.json.decode(content, type=kind)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from None


def encode(record: msgspec.Struct) -> bytes:
    """The content of the file of a record, or of other JSON of which a digest is kept."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def write(
    record: Record, evidence: Mapping[str, bytes] | None = None, roots: Sequence[Path] = ROOTS
) -> Record:
    """Add a record to the first of ``roots`` as the next attempt of its suite on its inputs; return it."""
    folder = folder_of(record.cell, record.inputs, roots[0])
    with exclusive_lock(folder, "the writing of a record"):
        attempts = [
            other.attempt for other in read(record.cell, record.inputs, roots) if other.suite == record.suite
        ]
        record = msgspec.structs.replace(record, attempt=max(attempts, default=0) + 1)
        for name, content in (evidence or {}).items():
            (folder / "evidence").mkdir(exist_ok=True)
            (folder / "evidence" / name).write_bytes(content)
        unfinished = folder / "unfinished"
        unfinished.write_bytes(encode(record))
        unfinished.rename(folder / file_name(record))
    return record


def read(cell: str, inputs: str, roots: Sequence[Path] = ROOTS) -> list[Record]:
    """The records of a cell's images of these inputs, by suite and time, from all of ``roots``.

    Time goes before the number of an attempt: of two merged branches, each has numbered its own.

    A `UserError` names a record that was changed, moved from another cell, or removed.
    """
    found: dict[str, Record] = {}
    for root in roots:
        for file in sorted(folder_of(cell, inputs, root).glob("*.json")):
            found[file.name] = _verified(file, cell, inputs)
    records = sorted(found.values(), key=lambda record: (record.suite, record.when, record.attempt))
    for suite in {record.suite for record in records}:
        attempts = {record.attempt for record in records if record.suite == suite}
        if missing := set(range(1, max(attempts))) - attempts:
            raise UserError(
                f"{folder_of(cell, inputs, roots[0])}: attempt {min(missing)} of the suite {suite} was "
                "removed: restore its record"
            )
    return records


def history(cell: str, roots: Sequence[Path] = ROOTS) -> list[Record]:
    """The records of all images of a cell."""
    folders = {folder.name for root in roots for folder in (root / cell).glob("*") if folder.is_dir()}
    return [record for inputs in sorted(folders) for record in read(cell, inputs, roots)]


def _verified(file: Path, cell: str, inputs: str) -> Record:
    """A record, if name, folder and content agree; else a `UserError`."""
    content = file.read_bytes()
    try:
        record = decode(content, Record)
    except msgspec.DecodeError as error:
        raise UserError(f"{file}: not a test record ({error}): restore it") from None
    if file.name != file_name(record) or content != encode(record):
        raise UserError(f"{file}: it was changed, since its name has the digest of other content: restore it")
    if (record.cell, record.inputs[:DIGITS]) != (cell, inputs[:DIGITS]):
        raise UserError(f"{file}: it is a record of {record.cell} with inputs {record.inputs}: move it back")
    if record.suite not in (CHECKS if cell == CHECKOUT else SUITES):
        raise UserError(f"{file}: there is no suite {record.suite} for it")
    return record


def altered_evidence(record: Record, root: Path = RECORDS) -> str | None:
    """Why the evidence of a record does not support its counts, or None."""
    folder = folder_of(record.cell, record.inputs, root) / "evidence"
    if record.passed and not record.evidence:
        return "it has no evidence"
    tally = Tally()
    for name in record.evidence:
        if not (folder / name).is_file():
            return f"{name} is missing"
        if sha256_file(folder / name) != Path(name).stem:
            return f"{name} was changed"
        if name.endswith(".xml"):
            tally.add(folder / name, 0)
            if tally.code:
                return f"{name} cannot be read"
    counted = (tally.passed, tally.failures, tally.skips)
    if tally.evidence and counted != (record.passed, record.failures, record.skips):
        return "its JUnit files have other counts"
    return None


def now() -> datetime.datetime:
    """The current time in UTC, in whole seconds."""
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0)


@contextmanager
def recording(tested: Subject, suite: str, roots: Sequence[Path] = ROOTS) -> Iterator[Tally]:
    """Time a suite and record its counts. An exception is a failure; an interrupt leaves no record.

    So are tests that changed while they ran: nobody knows which of them ran. A check is about its commit.
    """
    tally, start, when, commit = Tally(), time.monotonic(), now(), revision()
    tests = suite_digest(suite) if suite in SUITES else ""
    read(tested.cell, tested.inputs, roots)  # an altered record is an error before the suite, not after it
    try:
        yield tally
        if suite in SUITES and suite_digest(suite) != tests:
            raise UserError(f"the tests of {suite} changed while they ran: run them again")
        if suite in CHECKS and revision() != commit:
            raise UserError(f"the checkout changed while {suite} ran: run it again")
    except Exception:
        tally.code = tally.code or 1
        raise
    except BaseException:
        tally.code = -1
        raise
    finally:
        if tally.code >= 0:
            record = Record(
                cell=tested.cell,
                image=tested.image,
                inputs=tested.inputs,
                suite=suite,
                tests=tests,
                revision=commit,
                when=when,
                seconds=round(time.monotonic() - start, 1),
                outcome="failed" if tally.code or tally.failures else "passed",
                passed=tally.passed,
                failures=tally.failures,
                skips=tally.skips,
                evidence=tuple(tally.evidence),
                proofs=tuple(tally.proofs),
                executed=tally.executed or msgspec.UNSET,
            )
            tally.record = write(record, tally.evidence, roots)
