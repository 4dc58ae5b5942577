"""A warning before a suite runs on an image that was built before files of its inputs changed."""

from collections.abc import Mapping
from pathlib import Path

from scripts.git import DIRTY, changed_since
from scripts.images.inputs import REVISION
from scripts.matrix.load import Cell
from scripts.paths import ROOT

BUILT_FROM = ("images", "patches", "matrix.yaml")


def warning(cell: Cell, labels: Mapping[str, str], root: Path = ROOT) -> str | None:
    """Return a warning if files changed since the commit of an image with these labels, or None.

    The digest of the inputs decides whether a record counts; it takes seconds, this takes milliseconds.
    """
    commit = labels.get(REVISION, "").removesuffix(DIRTY)
    changed = changed_since(commit, BUILT_FROM, root)
    if not changed:
        return None
    more = f" and {len(changed) - 1} more" if changed[1:] else ""
    return (
        f"warning: {cell.tag} was built from commit {commit[:12]}, and {changed[0]}{more} changed since: "
        f"`bash scripts/nox.sh -s build -- {cell.id}` rebuilds it if that changes the image"
    )
