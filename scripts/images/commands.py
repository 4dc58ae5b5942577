"""``python -m scripts roots`` and ``build``: build root filesystems and images."""

import functools
from typing import Annotated

import typer

from scripts.digests import sha256_file
from scripts.docker.client import connect
from scripts.images import rootfs
from scripts.images.build import build, unpacked_size
from scripts.locks import preflight
from scripts.matrix.load import find, load, with_option
from scripts.matrix.model import STAND_IN

Cells = Annotated[list[str] | None, typer.Argument(metavar="CELL", help="Cell ids [the default cell].")]
CellId = Annotated[str | None, typer.Argument(metavar="CELL", help="A cell id [the default cell].")]


def register(app: typer.Typer) -> None:
    """Add the commands of this package to ``app``."""
    app.command("roots")(build_roots)
    app.command("build")(build_image)


def build_roots(cells: Cells = None) -> None:
    """Build the base root filesystems of cells from Debian packages."""
    matrix = load()
    wanted = {root for name in cells or [matrix.default] for root in rootfs.roots(find(matrix, name))}
    for root in sorted(wanted, key=lambda root: root.name):
        tag = rootfs.image(root)
        print(f"{tag}  {root.tar.stat().st_size / 1e6:.0f} MB  sha256:{sha256_file(root.tar)}")


def build_image(
    cell: CellId = None,
    stand_in: Annotated[
        bool,
        typer.Option(
            "--stand-in",
            help="Build the cell's stand-in for tests, where the cell's own packages are unavailable.",
        ),
    ] = False,
    options: Annotated[
        list[str] | None, typer.Option("--with", metavar="NAME", help="Add an optional package of the cell.")
    ] = None,
) -> None:
    """Build and tag the image of a cell; an image of the same inputs is kept."""
    matrix = load()
    name = (
        cell
        if cell is not None
        else (matrix.default if stand_in or options else preflight.default_cell(matrix).id)
    )
    found = find(matrix, name + STAND_IN if stand_in else name)
    chosen = functools.reduce(with_option, dict.fromkeys(options or []), found)
    image_id = build(chosen)
    image = connect().images.get(image_id)
    print(f"{chosen.tag}  {unpacked_size(image) / 1e6:.0f} MB  {image_id}")
