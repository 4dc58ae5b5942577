"""``python -m scripts lock``: write the locks, or check that they are up to date."""

import sys
from typing import Annotated

import typer

from scripts.errors import UserError
from scripts.locks import preflight, targets
from scripts.matrix.load import expand, find, load, plain_index_cells

Cells = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CELL|BASE|TOOLCHAIN", help="Cell ids, bases, toolchains [all, and the host's tools]."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands of this package to ``app``."""
    app.command("lock")(lock)


def lock(
    cells: Cells = None,
    host: Annotated[bool, typer.Option("--host", help="The host's own tools.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 if a lock is out of date.")
    ] = False,
    offline: Annotated[bool, typer.Option("--offline", help="With --check: query no index.")] = False,
) -> int:
    """Write the hashed locks of cells, of the bases' Debian packages and of the host's tools."""
    if offline and not check:
        raise UserError("--offline requires --check: a lock cannot be written without the index")
    matrix = load()
    everything = not (cells or host)
    every = (*matrix.bases, *matrix.toolchains)
    bases = [base for base in every if everything or base.name in (cells or [])]
    names = {base.name for base in bases}
    chosen = (
        [*expand(matrix), *plain_index_cells(matrix)]
        if everything
        else [find(matrix, name) for name in cells or [] if name not in names]
    )
    unlocked = [cell for cell in chosen if everything and targets.unlocked(cell)]
    chosen = [cell for cell in chosen if cell not in unlocked]
    items = [targets.target(cell) for cell in chosen]
    items += [targets.base_target(matrix, base) for base in bases]
    if everything or host:
        items.append(targets.host_target(matrix))
    if check:
        stale = False
        for line in targets.findings(items, offline):  # printed at once: the next may query an index
            print(line, file=sys.stderr)
            stale = True
        return int(stale)
    for cell in unlocked:
        print(f"{cell.id}: not locked; name it where {preflight.packages(cell)} are available")
    for cell in chosen:
        preflight.require_for_lock(cell)
    for item in items:
        targets.write(item)
    return 0
