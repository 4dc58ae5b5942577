"""``python -m scripts matrix``: list and show cells, and write what follows from ``matrix.yaml`` alone."""

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from scripts.matrix import host_cells
from scripts.matrix.load import SCHEMA, expand, find, load, schema

Check = Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 if the file is stale.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this package to ``app``."""
    group = typer.Typer(help="List and show cells, and write what follows from matrix.yaml.")
    group.command("list")(list_cells)
    group.command("show")(show_cell)
    group.command("schema")(write_schema)
    group.command("host-cells")(write_host_cells)
    app.add_typer(group, name="matrix")


def list_cells() -> None:
    """Print the id of each cell on a line."""
    print(*(cell.id for cell in expand(load())), sep="\n")


def show_cell(cell: Annotated[str, typer.Argument(metavar="CELL")]) -> None:
    """Print a cell with every reference resolved, as JSON."""
    print(msgspec.json.format(msgspec.json.encode(find(load(), cell)), indent=2).decode())


def write_schema(check: Check = False) -> int:
    """Write matrix.schema.json, which editors use for completion and descriptions."""
    return written(SCHEMA, schema(), "matrix schema", check)


def write_host_cells(check: Check = False) -> int:
    """Write the table of cells of `rlhf-stack doctor --host`."""
    text = host_cells.fill(host_cells.FILE.read_text(encoding="utf-8"), expand(load()))
    return written(host_cells.FILE, text, "matrix host-cells", check)


def written(file: Path, text: str, command: str, check: bool) -> int:
    """Write ``file``, or with ``check`` report whether it is stale."""
    if not check:
        file.write_text(text, encoding="utf-8")
    elif not file.exists() or file.read_text(encoding="utf-8") != text:
        print(f"{file.name} is stale: run python -m scripts {command}", file=sys.stderr)
        return 1
    return 0
