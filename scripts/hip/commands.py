"""``python -m scripts hip``: prove the ROCm recipes without AMD's software."""

from typing import Annotated

import typer

from scripts.errors import UserError
from scripts.hip import page, prove, recipes
from scripts.matrix.commands import written
from scripts.matrix.load import expand, find, load
from scripts.matrix.model import named

MOST_MINUTES = 1440.0


def register(app: typer.Typer) -> None:
    """Add the command of this package to ``app``."""
    app.command("hip")(hip)


def hip(
    cell: Annotated[
        str | None, typer.Argument(metavar="CELL", help="A ROCm cell with a compile_proof [the first one].")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Repeat what passed before.")] = False,
    minutes: Annotated[
        float | None,
        typer.Option(
            "--minutes", min=0.1, max=MOST_MINUTES, help="End a compilation that takes longer, and fail."
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run nothing; exit 1 if docs/amd.md disagrees with the records.")
    ] = False,
    offline: Annotated[
        bool, typer.Option("--offline", help="Run nothing; write docs/amd.md from the committed records.")
    ] = False,
) -> int:
    """Compile the recipes of a ROCm cell with Debian's HIP, and execute kernels of them on an emulator."""
    if check and offline:
        raise UserError(
            "--check and --offline exclude each other: one compares the page, the other writes it"
        )
    matrix = load()

    def derived() -> str:
        return page.text(matrix, page.PAGE.read_text(encoding="utf-8"))

    if check or offline:
        return written(page.PAGE, derived(), "hip --offline", check)
    proved = (one.id for one in expand(matrix) if named(matrix.variants, one.variant).compile_proof)
    chosen = find(matrix, cell or next(proved))
    recipes.proof_of(matrix, chosen)
    code, record = prove.prove(matrix, chosen, again, minutes)
    if record:
        page.keep(record)
        page.PAGE.write_text(derived(), encoding="utf-8")
    return code
