"""Check which rows of the known-bad database still apply.

Requirements that a row calls unsolvable are resolved against today's package index; the probes run in the
cell's image, on the packages that it patches as upstream released them. A row that no longer applies is to be
narrowed or removed, with the release that fixed it.
"""

import datetime
import json
from pathlib import Path

import docker
from rich.console import Console
from rich.table import Table
from rlhf_stack import known_bad
from rlhf_stack.known_bad import Row, probes

from scripts.docker.client import connect
from scripts.errors import UserError
from scripts.locks import lockfile, resolver
from scripts.matrix.load import Cell, find, load
from scripts.matrix.suites import SUITES
from scripts.patches.pristine import fetch_pristine, locked_hashes, unpack_pristine
from scripts.patches.series import series_of
from scripts.testing import records
from scripts.testing.cluster import LABEL, MEBIBYTE, killed_after, owner_label, remove_on_exit, sweep
from scripts.testing.in_image import local_image

PRISTINE = "/opt/pristine"
# Released as source only: resolving their metadata would compile them, and the other rows do not need it.
SOURCES = ("deepspeed", "flash-attn", "transformers-stream-generator")
UNKNOWN = "unknown"
NOT_PROBED = "its sources alone"
COMMAND = ["python", "-m", "rlhf_stack.known_bad.probes"]

Outcomes = dict[str, tuple[str, str]]


def resolved(rows: list[Row], cell: Cell) -> Outcomes:
    """The outcome of each row with requirements; it holds if the resolver reports the row's own symptom."""
    found = {}
    for row in rows:
        question = resolver.Question(
            name="requirements",
            requirements="".join(f"{line}\n" for line in row.unsolvable),
            python=cell.python,
            exclude_newer=datetime.datetime.now(tz=datetime.UTC).date() + datetime.timedelta(days=1),
            platform=resolver.platform(cell.base),
            excluded=SOURCES,
        )
        if row.unsolvable:
            found[row.id] = outcome(row, _resolver_error(question))
    return found


def outcome(row: Row, error: str | None) -> tuple[str, str]:
    """The state of a row and the evidence, from the resolver's error; None if it found a solution."""
    if error is None:
        return probes.GONE, f"{', '.join(row.unsolvable)} can be resolved"
    findings = known_bad.explain([row], error)
    return (probes.HOLDS, findings[0].evidence) if findings else (UNKNOWN, error)


def released(cell: Cell) -> list[Path]:
    """The packages that a cell patches, unpacked as upstream released them."""
    lock = lockfile.path(cell).read_text(encoding="utf-8")
    return [
        unpack_pristine(fetch_pristine(package, version, locked_hashes(package, version, lock)))
        for package, version in ((one.package, one.version) for one in series_of(cell))
    ]


def probed(client: docker.DockerClient, cell: Cell, image: str) -> Outcomes:
    """The outcomes of the probes in an image of the cell; a `UserError` if they could not run."""
    folders = released(cell)
    path = ":".join(f"{PRISTINE}/{folder.name}" for folder in folders)
    container = client.containers.create(
        image,
        COMMAND,
        environment={"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        volumes={str(folder): {"bind": f"{PRISTINE}/{folder.name}", "mode": "ro"} for folder in folders},
        labels={LABEL: owner_label()},
        shm_size=1024 * MEBIBYTE,
        working_dir="/tmp",  # noqa: S108
    )
    with remove_on_exit([container]):
        container.start()
        with killed_after(SUITES["known-bad"].hours, container, "the probes"):
            code = container.wait()["StatusCode"]
        printed = container.logs(stdout=True, stderr=False).decode()
        if code:
            errors = container.logs(stdout=False, stderr=True).decode().strip()
            raise UserError(f"the probes failed in {image}: {(errors.splitlines() or ['no output'])[-1]}")
    return {name: (state, evidence) for name, (state, evidence) in json.loads(printed).items()}


def show(outcomes: Outcomes, rows: int) -> None:
    """Print the outcome of each row that can be probed on a CPU, and their number."""
    table = Table("row", "outcome", "evidence")
    for name, (state, evidence) in sorted(outcomes.items()):
        table.add_row(name, state, evidence[:160])
    console = Console(highlight=False)
    console.print(table)
    console.print(f"{len(outcomes)} of {rows} rows can be probed on a CPU; the others rely on their sources")


def _resolver_error(question: resolver.Question) -> str | None:
    try:
        resolver.answer(question)
    except UserError as problem:
        return str(problem)
    return None


def check(cell: Cell) -> int:
    """Resolve and probe the rows, and print their outcomes; 1 if a row no longer applies."""
    matrix = load()
    client = connect()
    image = local_image(client, cell)
    sweep(client)
    rows = known_bad.load()
    with records.recording(records.subject(cell, client.images.get(image)), "known-bad") as tally:
        outcomes = resolved(rows, find(matrix, matrix.default)) | probed(client, cell, image)
        tally.attach(json.dumps(outcomes, indent=1, sort_keys=True).encode(), ".json")
        for row in rows:
            tally.count(row.id, *counted(*outcomes.get(row.id, (NOT_PROBED, ""))))
    show(outcomes, len(rows))
    return 1 if tally.failures else 0


def counted(state: str, evidence: str) -> tuple[int, str]:
    """How the outcome of a row counts as that of a test, and why it is skipped."""
    if state == probes.HOLDS:
        return records.PASSED, ""
    if state == probes.GONE:
        return records.FAILED, ""
    return records.SKIPPED, state if state == NOT_PROBED else f"{state}: {evidence}"
