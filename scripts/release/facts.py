"""The facts about cells' images, which follow from the committed records and from nothing else.

``images/records/<cell>/<inputs>/`` has the records of the suites (`testing.records`) and, in ``measured/``,
the measurements of the images, each named after its sha256. ``images/catalogue.json`` is written from them.
"""

import datetime
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from scripts.digests import sha256
from scripts.errors import UserError
from scripts.images.source import source_digest
from scripts.matrix.load import Cell
from scripts.matrix.suites import SUITES
from scripts.patches.series import series_of
from scripts.paths import ROOT
from scripts.testing import records
from scripts.testing.proofs import Proved, executed_of, proofs_of
from scripts.testing.records import COMMITTED, DIGITS, RECORDS, Executed, Record

CATALOGUE = ROOT / "images" / "catalogue.json"
MEASURED = "measured"


class Layer(msgspec.Struct, frozen=True):
    """A layer: the digest of its content, and its unpacked size in bytes."""

    digest: str
    size: int


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measurements of a cell's image: ``size`` in bytes; ``layers`` bottom first, empty if unknown.

    ``inputs`` is the digest of the inputs of its build, ``source`` that of sources that give these inputs,
    ``revision`` the commit that it was built from.
    """

    cell: str
    image: str
    inputs: str
    source: str
    revision: str
    when: datetime.datetime
    stand_in: str
    size: int
    layers: tuple[Layer, ...]
    versions: dict[str, str]
    patches: tuple[str, ...]
    architectures: dict[str, tuple[str, ...]]


class SuiteResult(msgspec.Struct, frozen=True):
    """The last result of a suite on an image of the same inputs, and its attempts on these images.

    ``tests`` is the digest of its tests, ``most`` how many of the same tests passed in its best attempt.
    """

    record: str
    image: str
    revision: str
    tests: str
    when: datetime.datetime
    most: int
    outcome: str
    passed: int
    failed: int
    skips: dict[str, int]
    seconds: float
    attempts: int
    failed_attempts: int


class Facts(Measured, frozen=True, kw_only=True):
    """The measurements of a cell's image with the results of its suites, of which ``record`` is the proof."""

    proofs: dict[str, Proved]
    executed: dict[str, Executed] = {}
    suites: dict[str, SuiteResult]

    @property
    def passed(self) -> int:
        """The number of tests that passed, in all suites."""
        return sum(suite.passed for suite in self.suites.values())


def load(cells: Iterable[Cell], root: Path = COMMITTED) -> dict[str, Facts]:
    """Return the facts of each cell that has any; `UserError` names an altered or removed record."""
    found = {cell.id: _facts(cell, root) for cell in cells}
    return {cell_id: facts for cell_id, facts in found.items() if facts}


def dump(facts: Mapping[str, Facts]) -> str:
    """Return the text of the file: sorted, one field per line."""
    return json.dumps(msgspec.to_builtins(facts), indent=1, sort_keys=True) + "\n"


def is_current(cell: Cell, facts: Facts) -> bool:
    """Return whether the image has the inputs that this checkout gives."""
    return facts.source == source_digest(cell)


def shared(cell: str, facts: Mapping[str, Facts]) -> int | None:
    """Return the bytes of a cell's layers that other published cells have, None if layers are unknown."""
    own = facts[cell].layers
    published = [other for name, other in facts.items() if name != cell and not other.stand_in]
    others = {layer.digest for other in published for layer in other.layers}
    return sum(layer.size for layer in own if layer.digest in others) if own else None


def keep(measured: Measured, root: Path = COMMITTED, local: Path = RECORDS) -> None:
    """Add a measurement, unless nothing was measured differently, and the local records of the same inputs.

    A `UserError` names a record whose evidence was altered: it proves no figure.
    """
    for record in records.read(measured.cell, measured.inputs, (local, root)):
        source = records.folder_of(record.cell, record.inputs, local) / records.file_name(record)
        if not source.exists():
            continue
        if wrong := records.altered_evidence(record, local):
            raise UserError(
                f"{source}: {wrong}: restore it, or remove {source.parent} and run its suites again"
            )
        target = records.folder_of(record.cell, record.inputs, root) / source.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    known = [
        msgspec.structs.replace(other, when=measured.when) for other in measurements(measured.cell, root)
    ]
    if measured not in known[-1:]:
        content = records.encode(measured)
        file = records.folder_of(measured.cell, measured.inputs, root) / MEASURED / _name(content)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def measurements(cell_id: str, root: Path = COMMITTED) -> list[Measured]:
    """Return the measurements of a cell's images, oldest first; `UserError` if one was altered."""
    found = [_measurement(file) for file in sorted((root / cell_id).glob(f"*/{MEASURED}/*.json"))]
    return sorted(found, key=lambda measured: measured.when)


def _facts(cell: Cell, root: Path) -> Facts | None:
    """Return the facts about the cell's last measured image with records of its inputs, else the last."""
    known = [(measured, _results(measured, root)) for measured in measurements(cell.id, root)]
    if not known:
        return None
    measured, results = next((item for item in reversed(known) if item[1]), known[-1])
    proofs, executed = {}, {}
    if "patches" in results and measured.source == source_digest(cell):
        proofs = proofs_of(series_of(cell), results["patches"][-1].proofs)
        noted = [attempts[-1].executed for attempts in results.values()]
        executed = executed_of(series_of(cell), [one for one in noted if one is not msgspec.UNSET])
    return Facts(
        **msgspec.structs.asdict(measured),
        proofs=proofs,
        executed=executed,
        suites={name: _result(attempts) for name, attempts in results.items()},
    )


def _results(measured: Measured, root: Path) -> dict[str, list[Record]]:
    """Return all attempts of each suite on images of the same inputs.

    Each machine builds them again, and they differ in timestamps, so that one machine's results stay valid on
    the next. An image that is published needs results of its own (`requirements.suites`).
    """
    found = records.read(measured.cell, measured.inputs, (root,))
    by_suite = {name: [record for record in found if record.suite == name] for name in SUITES}
    return {name: attempts for name, attempts in by_suite.items() if attempts}


def all_measurements(root: Path = COMMITTED) -> list[Measured]:
    """Return the measurements of every image; `UserError` if one was altered."""
    return [_measurement(file) for file in sorted(root.glob(f"*/*/{MEASURED}/*.json"))]


def inputs_of_images(root: Path = COMMITTED) -> dict[str, str]:
    """Return the inputs digest of each image that was measured, by its id."""
    return {measured.image: measured.inputs for measured in all_measurements(root)}


def _result(attempts: Sequence[Record]) -> SuiteResult:
    last = attempts[-1]
    return SuiteResult(
        record=records.file_name(last),
        image=last.image,
        revision=last.revision,
        tests=last.tests,
        when=last.when,
        most=max(record.passed for record in attempts if record.tests == last.tests),
        outcome=last.outcome,
        passed=last.passed,
        failed=len(last.failures),
        skips=last.skips,
        seconds=last.seconds,
        attempts=len(attempts),
        failed_attempts=sum(record.outcome == "failed" for record in attempts),
    )


def _name(content: bytes) -> str:
    return f"{sha256(content)[:DIGITS]}.json"


def _measurement(file: Path) -> Measured:
    content = file.read_bytes()
    try:
        measured = records.decode(content, Measured)
    except msgspec.DecodeError as error:
        raise UserError(f"{file}: not a measurement ({error}): restore it") from None
    place = file.parents[2].name, file.parents[1].name
    if file.name != _name(content) or (measured.cell, measured.inputs[:DIGITS]) != place:
        raise UserError(f"{file}: it was changed or moved: restore it")
    return measured
