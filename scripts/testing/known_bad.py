"""Ask the rows of the known-bad database whether they still hold.

``PYTHONPATH=images/runtime python -m scripts.testing.known_bad [CELL]``.

Requirements that are said to exclude each other are given to a resolver, as the index stands today; the
probes run in the cell's image, on the packages that it patches as upstream released them. Exit code 1 if a
row no longer holds: it is to be narrowed or taken out, with the release that mended it.
"""

import argparse
import datetime
import json

import docker
from rich.console import Console
from rich.table import Table
from rlhf_stack import known_bad
from rlhf_stack.known_bad import Row, probes

from scripts.docker.client import connect, with_docker_errors
from scripts.errors import UserError, run
from scripts.locks import resolver
from scripts.matrix.load import Cell, find, load
from scripts.testing.cluster import LABEL, owner, removed_at_the_end, sweep
from scripts.testing.in_image import MEGABYTE, built, pristine

PRISTINE = "/opt/pristine"
# Released as source only: asking for their metadata would compile, and says nothing of the rest.
SOURCES = ("deepspeed", "flash-attn", "transformers-stream-generator")
UNKNOWN = "unknown"
COMMAND = ["python", "-m", "rlhf_stack.known_bad.probes"]

Outcomes = dict[str, tuple[str, str]]


def resolved(rows: list[Row], cell: Cell) -> Outcomes:
    """What a resolver says of each row's requirements; it holds if the answer has the row's own symptom."""
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
            found[row.id] = outcome(row, _answer(question))
    return found


def outcome(row: Row, answer: str | None) -> tuple[str, str]:
    """What a resolver's ``answer`` says of a row: its error, or None if it found a solution."""
    if answer is None:
        return probes.GONE, f"{', '.join(row.unsolvable)} can be resolved"
    seen = known_bad.explain([row], answer)
    return (probes.HOLDS, seen[0].evidence) if seen else (UNKNOWN, answer)


def probed(client: docker.DockerClient, cell: Cell, image: str) -> Outcomes:
    """What the probes say in an image of the cell; a `UserError` if they could not run."""
    container = client.containers.create(
        image,
        COMMAND,
        environment={"PYTHONPATH": PRISTINE, "PYTHONDONTWRITEBYTECODE": "1"},
        volumes={str(pristine(cell)): {"bind": PRISTINE, "mode": "ro"}},
        labels={LABEL: owner()},
        shm_size=1024 * MEGABYTE,
        working_dir="/tmp",  # noqa: S108
    )
    with removed_at_the_end([container]):
        container.start()
        code = container.wait()["StatusCode"]
        told = container.logs(stdout=True, stderr=False).decode()
        if code:
            errors = container.logs(stdout=False, stderr=True).decode().strip()
            raise UserError(f"the probes failed in {image}: {(errors.splitlines() or ['no reason'])[-1]}")
    return {name: (state, seen) for name, (state, seen) in json.loads(told).items()}


def show(outcomes: Outcomes, rows: int) -> None:
    """A row for each that was asked, and how many cannot be."""
    table = Table("row", "outcome", "seen")
    for name, (state, seen) in sorted(outcomes.items()):
        table.add_row(name, state, seen[:160])
    console = Console(highlight=False)
    console.print(table)
    console.print(f"{len(outcomes)} of {rows} rows can be probed on a CPU; the rest rests on its sources")


def _answer(question: resolver.Question) -> str | None:
    try:
        resolver.answer(question)
    except UserError as problem:
        return str(problem)
    return None


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.testing.known_bad", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("cell", nargs="?", help="a cell id; the default cell if none is given")
    options = parser.parse_args()
    matrix = load()
    cell = find(matrix, options.cell or matrix.default)
    client = connect()
    image = built(client, cell)
    sweep(client)
    rows = known_bad.load()
    outcomes = resolved(rows, find(matrix, matrix.default)) | probed(client, cell, image)
    show(outcomes, len(rows))
    return 1 if any(state == probes.GONE for state, _ in outcomes.values()) else 0


if __name__ == "__main__":
    run(with_docker_errors(main))
