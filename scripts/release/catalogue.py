"""The catalogue: the local images' measurements and records, and the pages that follow from them.

`write` adds to the committed records (`release.facts`) and writes the pages; `check` derives the pages again
and reports each one that differs. No figure can be written to a page without its record.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import docker
import docker.errors
import msgspec
from docker.models.images import Image

from scripts.docker.client import connect
from scripts.errors import UserError
from scripts.git import history
from scripts.images.source import source_digest
from scripts.matrix.load import Cell, expand_all, load
from scripts.paths import ROOT
from scripts.release import certificates, facts, fault_cases, soaks
from scripts.release.facts import Facts, Measured
from scripts.release.measure import OtherInputsError, measure
from scripts.release.render import fill, page
from scripts.testing import records
from scripts.testing.records import DIGITS

README = ROOT / "README.md"
PAGE = ROOT / "images" / "README.md"
# What may differ between two builds from the same inputs.
OF_ONE_BUILD = ("image", "revision", "layers", "size", "when", "source")
ONLY_ADDED = ("images/records", "images/soaks", "images/certificates")
SIZE_TOLERANCE = 0.01  # compiled Python files differ slightly between builds


def write(offline: bool) -> list[str]:
    """Unless ``offline``, measure the local images and add their records; write the pages.

    Return a line for each image that cannot be measured.
    """
    cells = expand_all(load())
    reasons: list[str] = []
    if not offline:
        found, reasons = measure_all(connect(), cells)
        for measured in found.values():
            facts.keep(measured)
    for path, text in texts(cells, facts.load(cells), README.read_text(encoding="utf-8")).items():
        path.write_text(text, encoding="utf-8")
    return reasons


def check(offline: bool) -> list[str]:
    """Return a line for each stale file, removed record, and record with other evidence on this machine.

    Unless ``offline``, also for each local image that cannot be measured or disagrees with its facts.
    """
    cells = expand_all(load())
    known = facts.load(cells)
    reasons = stale(cells, known, README.read_text(encoding="utf-8"))
    try:
        reasons += removed() + fault_cases.removed()
    except UserError as error:
        reasons.append(str(error))
    reasons += contradicted(known) + certificates.unknown(certificates.load())
    if not reasons and not offline:
        found, reasons = measure_all(connect(), [cell for cell in cells if cell.id in known])
        for cell_id, measured in found.items():
            reasons += differences(known[cell_id], measured)
    return reasons


def unverified() -> list[str]:
    """Return a line for each cell whose sources changed since its image was tested."""
    cells = expand_all(load())
    known = facts.load(cells)
    return [
        f"{cell.id}: verified for the sources {known[cell.id].source[:DIGITS]}, this checkout has "
        f"{source_digest(cell)[:DIGITS]}: not verified yet"
        for cell in cells
        if cell.id in known and not facts.is_current(cell, known[cell.id])
    ]


def texts(cells: Sequence[Cell], known: Mapping[str, Facts], readme: str) -> dict[Path, str]:
    """Return the generated files that result from the matrix and the facts."""
    return {
        facts.CATALOGUE: facts.dump(known),
        PAGE: page(cells, known, fault_cases.load(), soaks.load()),
        README: fill(readme, cells, known),
    }


def stale(cells: Sequence[Cell], known: Mapping[str, Facts], readme: str) -> list[str]:
    """Return a line for each file that is not what follows from the records and the sources."""
    return [
        f"{path.relative_to(ROOT)} does not follow from the records and sources: "
        "run python -m scripts catalogue --offline"
        for path, text in texts(cells, known, readme).items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]


def removed(root: Path = ROOT, folders: Sequence[str] = ONLY_ADDED) -> list[str]:
    """Return a line for each file of ``folders`` that a commit, a merge or an uncommitted change removed.

    A shallow clone has only the history that it fetched. `UserError` if git cannot read it.
    """
    only_names = ("--no-renames", "--diff-filter=D", "--name-only", "-z")
    deleted: set[str] = set()
    for command in (["log", "--full-history", "-m", "--format=", *only_names], ["diff", "HEAD", *only_names]):
        listing = history(*command, "--", *folders, root=root)
        deleted |= {name for name in listing.replace("\n", "").split("\0") if name}
    missing = sorted(name for name in deleted if not (root / name).exists())
    return [f"{name} was removed, and records are only added: git log -- {name}" for name in missing]


def contradicted(known: Mapping[str, Facts], roots: Sequence[Path] = records.ROOTS) -> list[str]:
    """Return a line for each record of this machine whose evidence was altered; others have it elsewhere."""
    return [
        f"{record.cell}: the record {records.file_name(record)}: {altered}"
        for measured in known.values()
        for record in records.read(measured.cell, measured.inputs, roots)
        if (records.folder_of(record.cell, record.inputs, roots[0]) / records.file_name(record)).exists()
        and (altered := records.altered_evidence(record, roots[0]))
    ]


def differences(known: Facts, measured: Measured) -> list[str]:
    """Return a line if the local image disagrees with the facts about an image of the same inputs."""
    if known.inputs != measured.inputs:
        return [f"{known.cell}: the facts are of other inputs: run python -m scripts catalogue"]
    now = msgspec.structs.asdict(measured)
    found = [name for name in now if name not in OF_ONE_BUILD and getattr(known, name) != now[name]]
    if abs(measured.size - known.size) > SIZE_TOLERANCE * known.size:
        found.append(f"size ({known.size / 1e6:.0f} MB, now {measured.size / 1e6:.0f} MB)")
    if not found:
        return []
    return [f"{known.cell}: the local image has other {', '.join(found)}: run python -m scripts catalogue"]


def images(client: docker.DockerClient, cells: Iterable[Cell]) -> dict[str, Image]:
    """Return the local images by cell."""
    found = {}
    for cell in cells:
        try:
            found[cell.id] = client.images.get(cell.tag)
        except docker.errors.ImageNotFound:
            continue
    return found


def measure_all(client: docker.DockerClient, cells: Sequence[Cell]) -> tuple[dict[str, Measured], list[str]]:
    """Return the measurements of the local images, and a line for each image that cannot be measured.

    Images of other inputs are reported and skipped.
    """
    measured: dict[str, Measured] = {}
    reasons = []
    local = images(client, cells)
    for cell in cells:
        if cell.id not in local:
            print(f"{cell.id}: no local image", flush=True)
            continue
        try:
            measured[cell.id] = measure(client, cell, local[cell.id])
            print(f"{cell.id}: measured", flush=True)
        except OtherInputsError as error:
            print(f"skipped: {error}", flush=True)
        except UserError as error:
            reasons.append(str(error))
    return measured, reasons
