"""``python -m scripts catalogue``, ``fault-table``, ``kernels`` and ``publish``."""

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from scripts.errors import UserError
from scripts.matrix.load import expand, find, load
from scripts.matrix.model import targets
from scripts.release import catalogue, fault_cases, kernels
from scripts.release.publish import publish_cells


def register(app: typer.Typer) -> None:
    """Add the commands of this package to ``app``."""
    app.command("catalogue")(write_catalogue)
    app.command("fault-table")(write_fault_table)
    app.command("kernels")(inspect_kernels)
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


def inspect_kernels(
    cell: Annotated[str, typer.Argument(metavar="CELL", help="A ROCm cell, whose GPUs are required.")],
    path: Annotated[
        Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="A wheel, .so or code object.")
    ],
) -> int:
    """Print as JSON the HIP kernels of a compiled file; exit 1 if one lacks a GPU or exceeds its LDS."""
    accelerator = find(load(), cell).accelerator
    if accelerator.kind != "rocm":
        raise UserError(f"{cell} has no HIP kernels: name a ROCm cell")
    found = kernels.read(path)
    if not found:
        raise UserError(f"{path}: no HIP kernels")
    print(msgspec.json.encode(found).decode())
    reasons = [
        f"{name}: {reason}"
        for name, code in found.items()
        for reason in kernels.problems(code, targets(accelerator))
    ]
    for reason in reasons:
        print(reason, file=sys.stderr)
    return 1 if reasons else 0


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
