"""The facts about cells' images: ``images/catalogue.json``, from which the generated pages are written.

Facts are valid for the lock, the patches and the versions that the image was built from.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from scripts.digests import sha256, sha256_file
from scripts.errors import UserError
from scripts.locks import lockfile
from scripts.matrix.load import Cell
from scripts.patches.series import Series, series_of
from scripts.paths import ROOT
from scripts.testing.proofs import Proved

CATALOGUE = ROOT / "images" / "catalogue.json"


class Layer(msgspec.Struct, frozen=True):
    """A layer: the digest of its content, and its unpacked size in bytes."""

    digest: str
    size: int


class SuiteResult(msgspec.Struct, frozen=True):
    """The result of a suite on the image."""

    outcome: str
    passed: int
    failed: int
    skipped: int
    seconds: float


class Facts(msgspec.Struct, frozen=True):
    """Measurements of a cell's image: ``size`` in bytes; ``layers`` bottom first, empty if unknown."""

    image: str
    revision: str
    stand_in: str
    size: int
    layers: tuple[Layer, ...]
    versions: dict[str, str]
    lock: str
    series: str
    patches: tuple[str, ...]
    proofs: dict[str, Proved]
    architectures: dict[str, tuple[str, ...]]
    suites: dict[str, SuiteResult]

    @property
    def passed(self) -> int:
        """The number of tests that passed, in all suites."""
        return sum(suite.passed for suite in self.suites.values())


def load(path: Path = CATALOGUE) -> dict[str, Facts]:
    """Return the facts by cell; `UserError` if the file has another structure."""
    if not path.exists():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Facts])
    except msgspec.DecodeError as error:
        raise UserError(
            f"{path.name}: {error}; it is written by `python -m scripts catalogue`, do not edit it"
        ) from None


def dump(facts: Mapping[str, Facts]) -> str:
    """Return the text of the file: sorted, one field per line."""
    return json.dumps(msgspec.to_builtins(facts), indent=1, sort_keys=True) + "\n"


def lock_digest(cell: Cell) -> str:
    """Return the sha256 of a cell's lock, empty if it was never written."""
    path = lockfile.path(cell)
    return sha256_file(path) if path.exists() else ""


def series_digest(series: Iterable[Series]) -> str:
    """Return the sha256 of the diffs of patch series; a changed header does not require a new image."""
    diffs = [(s.package, s.version, s.label, patch.name, patch.diff) for s in series for patch in s.patches]
    return sha256(repr(diffs))


def outdated(cell: Cell, facts: Facts) -> str | None:
    """Return which input changed since the image was measured, or None if the facts are valid."""
    if facts.versions != cell.versions:
        return "versions"
    if facts.lock != lock_digest(cell):
        return "lock"
    if facts.series != series_digest(series_of(cell)):
        return "patches"
    return None


def current(cells: Iterable[Cell], known: Mapping[str, Facts]) -> dict[str, Facts]:
    """Return the facts that are valid, by cell."""
    return {
        cell.id: known[cell.id]
        for cell in cells
        if cell.id in known and outdated(cell, known[cell.id]) is None
    }


def shared(cell: str, facts: Mapping[str, Facts]) -> int | None:
    """Return the bytes of a cell's layers that other cells of ``facts`` have, None if layers are unknown."""
    own = facts[cell].layers
    others = {layer.digest for name, other in facts.items() if name != cell for layer in other.layers}
    return sum(layer.size for layer in own if layer.digest in others) if own else None
