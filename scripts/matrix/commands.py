"""``python -m scripts matrix``: list and show cells, write the schema of ``matrix.yaml``."""

import sys
from typing import Annotated

import msgspec
import typer

from scripts.matrix.load import SCHEMA, expand, find, load, schema


def register(app: typer.Typer) -> None:
    """Add the commands of this package to ``app``."""
    group = typer.Typer(
        help="List and show cells, and write the schema of matrix.yaml.", no_args_is_help=True
    )
    group.command("list")(list_cells)
    group.command("show")(show_cell)
    group.command("schema")(write_schema)
    app.add_typer(group, name="matrix")


def list_cells() -> None:
    """Print the id of each cell on a line."""
    print(*(cell.id for cell in expand(load())), sep="\n")


def show_cell(cell: Annotated[str, typer.Argument(metavar="CELL")]) -> None:
    """Print a cell with every reference resolved, as JSON."""
    print(msgspec.json.format(msgspec.json.encode(find(load(), cell)), indent=2).decode())


def write_schema(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 if the file is stale.")
    ] = False,
) -> int:
    """Write matrix.schema.json, which editors use for completion and descriptions."""
    text = schema()
    if not check:
        SCHEMA.write_text(text, encoding="utf-8")
    elif not SCHEMA.exists() or SCHEMA.read_text(encoding="utf-8") != text:
        print(f"{SCHEMA.name} is stale: run python -m scripts matrix schema", file=sys.stderr)
        return 1
    return 0
