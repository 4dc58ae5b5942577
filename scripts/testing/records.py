"""What each test suite said of an image: ``build/records/<image id>/<suite>.json``.

A record belongs to an image by its id, so a rebuilt image has none until its suites ran again. `publish` asks
for those in `REQUIRED`, the catalogue shows all.
"""

import datetime
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

import msgspec

from scripts.errors import UserError
from scripts.matrix.load import Cell
from scripts.paths import ROOT

RECORDS = ROOT / "build" / "records"
DIRTY = "-dirty"
# Suites whose record an image needs before it is published, with the kinds of accelerator they apply to.
REQUIRED: Mapping[str, tuple[str, ...]] = {
    "image": ("cpu", "cuda", "rocm"),
    "layers": ("cpu", "cuda", "rocm"),
    "patches": ("cpu", "cuda", "rocm"),
    "cluster": ("cpu",),
    "integration": ("cpu", "cuda", "rocm"),
    "network": ("cpu",),
    "demo": ("cpu",),
}


class Proof(msgspec.Struct, frozen=True):
    """A patch test (its file and the test in it), and how its probe ended on both sides."""

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
    """What a running suite has counted so far; ``code`` is the worst exit code of its runs."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    code: int = 0
    proofs: list[Proof] = field(default_factory=list)

    def add(self, junit: Path, code: int) -> None:
        """Count one run of pytest by its JUnit file; a run that left none counts by its exit code alone."""
        self.code = max(self.code, abs(code))
        if not junit.exists():
            self.code = self.code or 1
            return
        cases = list(ElementTree.parse(junit).getroot().iter("testcase"))  # noqa: S314  (pytest wrote it)
        failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
        skipped = sum(case.find("skipped") is not None for case in cases)
        self.failed += failed
        self.skipped += skipped
        self.passed += len(cases) - failed - skipped
        self.proofs += [proof for case in cases if (proof := _proof(case))]


def _proof(case: ElementTree.Element) -> Proof | None:
    """What the fixture ``proves`` noted in a test case."""
    noted = {item.get("name"): item.get("value", "") for item in case.iter("property")}
    if not {"pristine", "patched"} <= set(noted):
        return None
    file = f"tests/{case.get('classname', '').replace('.', '/')}.py"
    return Proof(file, case.get("name", ""), noted["pristine"], noted["patched"])


def revision() -> str:
    """The commit that is checked out, marked if files differ from it or git does not know them."""
    commit = _git("rev-parse", "--verify", "--quiet", "HEAD")
    return f"{commit or 'unknown'}{DIRTY if _git('status', '--porcelain') else ''}"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def required(cell: Cell) -> tuple[str, ...]:
    """The suites that a cell's image has to pass before it is published."""
    return tuple(suite for suite, kinds in REQUIRED.items() if cell.accelerator.kind in kinds)


def folder_of(image: str, records: Path = RECORDS) -> Path:
    """Where the records of an image are, by its id."""
    return records / image.removeprefix("sha256:")


def write(record: Record, records: Path = RECORDS) -> Path:
    """Keep a record, in place of an older one of the same image and suite."""
    file = folder_of(record.image, records) / f"{record.suite}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".part")
    unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    unfinished.replace(file)
    return file


def read(image: str, records: Path = RECORDS) -> dict[str, Record]:
    """The records of an image by suite; a `UserError` names a file that is none."""
    found = {}
    for file in sorted(folder_of(image, records).glob("*.json")):
        try:
            found[file.stem] = msgspec.json.decode(file.read_bytes(), type=Record)
        except msgspec.DecodeError as error:
            raise UserError(
                f"{file}: not a test record ({error}); delete it and run the suite again"
            ) from None
    return found


def lacking(cell: Cell, found: Mapping[str, Record]) -> list[str]:
    """What of the required suites is not shown by the records ``found``; empty if all is."""
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
    """This second, in UTC."""
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0)


@contextmanager
def kept(cell: str, image: str, suite: str, records: Path = RECORDS) -> Iterator[Tally]:
    """Time a suite and keep what it counted. An exception is a failure; interrupted, it leaves no record."""
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
