"""The catalogue of the images: measured from what is built here, written from what was measured.

``python -m scripts.release.catalogue`` measures the images that are here and writes ``images/catalogue.json``, then
``images/README.md`` and the README's table of cells. What was measured of a cell whose image is not here
stays, until its lock, patches or versions change: then the cell is shown as not built. So does what was
measured of another image of the cell on which more of the required suites passed, if none failed on this one.

``--offline`` asks no engine. ``--check`` writes nothing and fails when a file does not follow from the
others, or, without ``--offline``, when an image that is here says something else than the catalogue.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import docker
import docker.errors
import msgspec
from docker.models.images import Image

from scripts.docker.client import connect, with_docker_errors
from scripts.errors import UserError, run
from scripts.matrix.load import Cell, expand, load, stand_ins
from scripts.paths import ROOT
from scripts.release import facts, fault_cases
from scripts.release.facts import Facts
from scripts.release.render import filled, page
from scripts.testing.records import required

README = ROOT / "README.md"
PAGE = ROOT / "images" / "README.md"
# Fields that differ between two builds of the same: what the image is called, and how long its tests ran.
OF_ONE_BUILD = ("image", "revision", "layers", "size", "suites", "proofs")
SIZE_TOLERANCE = 0.01  # compiled Python differs a little from build to build


def texts(cells: Sequence[Cell], known: Mapping[str, Facts], readme: str) -> dict[Path, str]:
    """The generated files, as they follow from the matrix and the facts."""
    return {
        facts.CATALOGUE: facts.dump(known),
        PAGE: page(cells, known, fault_cases.load()),
        README: filled(readme, cells, known),
    }


def write_texts() -> None:
    """Write the generated files again from what was measured before."""
    matrix = load()
    cells = (*expand(matrix), *stand_ins(matrix))
    _write(cells, still_true(cells, facts.load()))


def _write(cells: Sequence[Cell], known: Mapping[str, Facts]) -> None:
    for path, text in texts(cells, known, README.read_text(encoding="utf-8")).items():
        path.write_text(text, encoding="utf-8")


def still_true(cells: Iterable[Cell], known: Mapping[str, Facts]) -> dict[str, Facts]:
    """The facts of cells that exist and are not outdated."""
    return {
        cell.id: known[cell.id]
        for cell in cells
        if cell.id in known and facts.outdated(cell, known[cell.id]) is None
    }


def stale(cells: Sequence[Cell], known: Mapping[str, Facts], readme: str) -> list[str]:
    """What does not follow from what, a line each."""
    reasons = [
        f"{cell.id} was measured with other {what}: build and test it, then run `nox -s catalogue` "
        "(which shows it as not built, if it is not)"
        for cell in cells
        if cell.id in known and (what := facts.outdated(cell, known[cell.id]))
    ]
    ids = {cell.id for cell in cells}
    reasons += [f"{name} is no cell any more: run `nox -s catalogue`" for name in known if name not in ids]
    if reasons:
        return reasons
    return [
        f"{path.relative_to(ROOT)} is stale: run python -m scripts.release.catalogue --offline"
        for path, text in texts(cells, known, readme).items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]


def differences(cell: Cell, known: Facts, measured: Facts) -> list[str]:
    """In what an image that is here is another than the one that the catalogue describes."""
    before, now = msgspec.structs.asdict(known), msgspec.structs.asdict(measured)
    found = [name for name in before if name not in OF_ONE_BUILD and before[name] != now[name]]
    if abs(measured.size - known.size) > SIZE_TOLERANCE * known.size:
        found.append(f"size ({known.size / 1e6:.0f} MB, now {measured.size / 1e6:.0f} MB)")
    return [f"{cell.id}: its image has other {', '.join(found)}: run `nox -s catalogue`"] if found else []


def images(client: docker.DockerClient, cells: Iterable[Cell]) -> dict[str, Image]:
    """The images that are here, by cell."""
    found = {}
    for cell in cells:
        try:
            found[cell.id] = client.images.get(cell.tag)
        except docker.errors.ImageNotFound:
            continue
    return found


def measure_all(client: docker.DockerClient, cells: Sequence[Cell]) -> dict[str, Facts]:
    """The facts of the images that are here; one that is of an older tree is named and left out."""
    measured = {}
    here = images(client, cells)
    for cell in cells:
        if cell.id not in here:
            print(f"{cell.id}: no image here", flush=True)
            continue
        try:
            measured[cell.id] = facts.measure(client, cell, here[cell.id])
            print(f"{cell.id}: measured", flush=True)
        except UserError as problem:
            print(f"left out: {problem}: build it again", flush=True)
    return measured


def best_tested(
    cells: Sequence[Cell], known: Mapping[str, Facts], measured: Mapping[str, Facts]
) -> dict[str, Facts]:
    """Of each cell the image here, unless more of the required suites passed on the one that is known.

    What failed on the image here is always told.
    """
    best = {**known, **measured}
    for cell in cells:
        if cell.id in known and cell.id in measured:
            now, before = (_passed(cell, facts[cell.id]) for facts in (measured, known))
            failed = any(suite.outcome != "passed" for suite in measured[cell.id].suites.values())
            if len(before) > len(now) and not failed:
                only = ", ".join(sorted(before - now))
                print(f"{cell.id}: the row of another image stays, on which {only} passed too", flush=True)
                best[cell.id] = known[cell.id]
    return best


def _passed(cell: Cell, of: Facts) -> set[str]:
    return {name for name in required(cell) if name in of.suites and of.suites[name].outcome == "passed"}


def check(cells: Sequence[Cell], known: Mapping[str, Facts], offline: bool) -> int:
    """Tell what is stale; 1 if something is."""
    reasons = stale(cells, known, README.read_text(encoding="utf-8"))
    if not reasons and not offline:
        measured = measure_all(connect(), [cell for cell in cells if cell.id in known])
        for cell in cells:
            if cell.id in measured:
                reasons += differences(cell, known[cell.id], measured[cell.id])
    for reason in reasons:
        print(reason, file=sys.stderr)
    return 1 if reasons else 0


def main() -> int:
    """The command line; with ``--check`` exit code 1 when something is stale."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.release.catalogue", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when something is stale")
    parser.add_argument("--offline", action="store_true", help="ask no engine; take what was measured before")
    options = parser.parse_args()
    matrix, known = load(), facts.load()
    cells = (*expand(matrix), *stand_ins(matrix))
    if options.check:
        return check(cells, known, options.offline)
    current = still_true(cells, known)
    if not options.offline:
        current = best_tested(cells, current, measure_all(connect(), cells))
    _write(cells, current)
    return 0


if __name__ == "__main__":
    run(with_docker_errors(main))
