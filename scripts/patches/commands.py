"""``python -m scripts patches``: list the patches, and check that they may be carried and still apply."""

import sys
from datetime import date

import typer
from rich.console import Console
from rich.table import Table

from scripts.errors import UserError
from scripts.matrix.load import expand, load
from scripts.patches import check
from scripts.patches.pristine import fetch_pristine
from scripts.patches.series import load_all, series_of


def register(app: typer.Typer) -> None:
    """Add the commands of this package to ``app``."""
    group = typer.Typer(help="List the patches, and check that each still applies.")
    group.command("list")(list_patches)
    group.command("check")(check_patches)
    app.add_typer(group, name="patches")


def list_patches() -> None:
    """List every patch with the cells that it is for, where it was offered upstream and its review date."""
    table = Table("package", "patch", "kind", "what it does", "cells", "upstream", "review by")
    for series in load_all():
        package = f"{series.package} {series.version}+{series.label}"
        for patch in series.patches:
            kind, cells, upstream = (patch.header[field] for field in ("Kind", "Cells", "Forwarded"))
            table.add_row(package, patch.name, kind, patch.title, cells, upstream, str(patch.review_by))
    Console().print(table)


def check_patches() -> None:
    """Fail if a patch has expired, does not apply to the pinned wheel, or needs another patch to apply."""
    errors = []
    cells = expand(load())
    for series in load_all():
        carrying = [cell.id for cell in cells if series in series_of(cell)]
        errors += check.unnamed_cells(series, carrying)
        errors += check.expired(series, date.today(), check.existing_tests())
    for series, hashes in check.pinned():
        try:
            wheel = fetch_pristine(series.package, series.version, hashes)
        except UserError as problem:
            print(
                f"not checked: whether patches of {series.package} {series.version} apply: {problem}",
                file=sys.stderr,
            )
            continue
        found, warnings = check.misfits(wheel, series)
        errors += found
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    if errors:
        raise typer.Exit(1)
