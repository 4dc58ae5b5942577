"""``python -m scripts catalogue``, ``fault-table`` and ``publish``."""

import sys
from typing import Annotated

import typer

from scripts.matrix.load import expand, find, load
from scripts.release import catalogue, fault_cases
from scripts.release.publish import publish_cells


def register(app: typer.Typer) -> None:
    """Add the commands of this package to ``app``."""
    app.command("catalogue")(write_catalogue)
    app.command("fault-table")(write_fault_table)
    app.command("publish")(publish)


def write_catalogue(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 if a file or an image disagrees.")
    ] = False,
    offline: Annotated[
        bool, typer.Option("--offline", help="Do not measure the local images; use the recorded facts.")
    ] = False,
) -> int:
    """Measure the local images; write images/catalogue.json, images/README.md and the README's table."""
    if not check:
        catalogue.write(offline)
        return 0
    reasons = catalogue.check(offline)
    for line in catalogue.unverified():
        print(line)
    for reason in reasons:
        print(reason, file=sys.stderr)
    return 1 if reasons else 0


def write_fault_table() -> None:
    """Merge the results of the suite faults into images/faults.json and rewrite the catalogue's page."""
    cases = fault_cases.update()
    catalogue.write(offline=True)
    print(f"{fault_cases.MERGED.name}: {cases} cases")


def publish(
    repository: Annotated[
        str, typer.Argument(metavar="REGISTRY/REPO", help="Such as ghcr.io/you/rlhf-stacks.")
    ],
    cells: Annotated[
        list[str] | None, typer.Option("--cell", metavar="CELL", help="A cell id [all cells].")
    ] = None,
) -> int:
    """Push the tested images of cells to a registry."""
    matrix = load()
    chosen = [find(matrix, name) for name in dict.fromkeys(cells)] if cells else expand(matrix)
    return publish_cells(repository, chosen)
