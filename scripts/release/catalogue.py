"""The catalogue: facts measured from the local images, and the pages written from the facts.

The facts of a cell without a local image are kept; if one of its inputs has changed, the pages state that it
was not built since. The facts are also kept if more of the required suites passed on the image that they
describe than on the local image, unless a suite failed on the local one.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import docker
import docker.errors
import msgspec
from docker.models.images import Image

from scripts.docker.client import connect
from scripts.errors import UserError
from scripts.matrix.load import Cell, expand, load, stand_ins
from scripts.paths import ROOT
from scripts.release import facts, fault_cases
from scripts.release.facts import Facts
from scripts.release.measure import measure
from scripts.release.render import fill, page
from scripts.testing.records import required

README = ROOT / "README.md"
PAGE = ROOT / "images" / "README.md"
# Fields that differ between two builds from the same inputs.
OF_ONE_BUILD = ("image", "revision", "layers", "size", "suites", "proofs")
SIZE_TOLERANCE = 0.01  # compiled Python files differ slightly between builds


def write(offline: bool) -> None:
    """Measure the local images unless ``offline``, and write the facts and the pages."""
    cells = _cells()
    known = {cell.id: found for cell in cells if (found := facts.load().get(cell.id))}
    if not offline:
        known = best_tested(cells, known, measure_all(connect(), cells))
    for path, text in texts(cells, known, README.read_text(encoding="utf-8")).items():
        path.write_text(text, encoding="utf-8")


def check(offline: bool) -> list[str]:
    """Return a line for each stale file and, unless ``offline``, each image that disagrees with its facts."""
    cells, known = _cells(), facts.load()
    reasons = stale(cells, known, README.read_text(encoding="utf-8"))
    if not reasons and not offline:
        measured = measure_all(connect(), [cell for cell in cells if cell.id in known])
        for cell in cells:
            if cell.id in measured:
                reasons += differences(cell, known[cell.id], measured[cell.id])
    return reasons


def texts(cells: Sequence[Cell], known: Mapping[str, Facts], readme: str) -> dict[Path, str]:
    """Return the generated files that result from the matrix and the facts."""
    return {
        facts.CATALOGUE: facts.dump(known),
        PAGE: page(cells, known, fault_cases.load()),
        README: fill(readme, cells, known),
    }


def stale(cells: Sequence[Cell], known: Mapping[str, Facts], readme: str) -> list[str]:
    """Return a line for each cell that no longer exists, else for each stale file."""
    ids = {cell.id for cell in cells}
    if gone := [name for name in known if name not in ids]:
        return [f"{name} is no longer a cell: run python -m scripts catalogue --offline" for name in gone]
    return [
        f"{path.relative_to(ROOT)} is stale: run python -m scripts catalogue --offline"
        for path, text in texts(cells, known, readme).items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]


def differences(cell: Cell, known: Facts, measured: Facts) -> list[str]:
    """Return a line if the local image disagrees with the facts."""
    before, now = msgspec.structs.asdict(known), msgspec.structs.asdict(measured)
    found = [name for name in before if name not in OF_ONE_BUILD and before[name] != now[name]]
    if abs(measured.size - known.size) > SIZE_TOLERANCE * known.size:
        found.append(f"size ({known.size / 1e6:.0f} MB, now {measured.size / 1e6:.0f} MB)")
    if not found:
        return []
    return [f"{cell.id}: the local image has other {', '.join(found)}: run python -m scripts catalogue"]


def images(client: docker.DockerClient, cells: Iterable[Cell]) -> dict[str, Image]:
    """Return the local images by cell."""
    found = {}
    for cell in cells:
        try:
            found[cell.id] = client.images.get(cell.tag)
        except docker.errors.ImageNotFound:
            continue
    return found


def measure_all(client: docker.DockerClient, cells: Sequence[Cell]) -> dict[str, Facts]:
    """Return the facts of the local images; those of older checkouts are reported and skipped."""
    measured = {}
    local = images(client, cells)
    for cell in cells:
        if cell.id not in local:
            print(f"{cell.id}: no local image", flush=True)
            continue
        try:
            measured[cell.id] = measure(client, cell, local[cell.id])
            print(f"{cell.id}: measured", flush=True)
        except UserError as error:
            print(f"skipped: {error}: rebuild it", flush=True)
    return measured


def best_tested(
    cells: Sequence[Cell], known: Mapping[str, Facts], measured: Mapping[str, Facts]
) -> dict[str, Facts]:
    """Return the facts of each cell: of the local image, or of the known one if it is better tested.

    A local image on which a suite failed, and one whose known facts are outdated, always replaces the known.
    """
    best = {**known, **measured}
    for cell_id, before in facts.current(cells, known).items():
        now = measured.get(cell_id)
        if now is None or any(suite.outcome != "passed" for suite in now.suites.values()):
            continue
        cell = next(cell for cell in cells if cell.id == cell_id)
        if len(_passed(cell, before)) > len(_passed(cell, now)):
            missing = ", ".join(sorted(_passed(cell, before) - _passed(cell, now)))
            print(f"{cell_id}: keeping the facts of another image, on which {missing} passed", flush=True)
            best[cell_id] = before
    return best


def _cells() -> tuple[Cell, ...]:
    matrix = load()
    return (*expand(matrix), *stand_ins(matrix))


def _passed(cell: Cell, measured: Facts) -> set[str]:
    return {
        name
        for name in required(cell)
        if name in measured.suites and measured.suites[name].outcome == "passed"
    }
