"""A series without one of its patches: the files that differ, for the test of that patch alone."""

import zipfile
from collections.abc import Iterable
from pathlib import Path

from scripts.locks import lockfile
from scripts.matrix.model import Cell
from scripts.patches.apply import apply, site_packages
from scripts.patches.pristine import fetch_pristine, locked_hashes
from scripts.patches.series import Patch, Series, series_of
from scripts.patches.wheel_files import Files, WheelFile


def files_to_patch(wheel: Path, series: Series) -> Files:
    """Return the files of a released wheel that a series changes, by their paths in site-packages."""
    changed = {name for patch in series.patches for name in patch.files}
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        prefix = site_packages(wheel.name, names)
        present = [name for name in sorted(changed) if prefix + name in names]
        return {name: WheelFile(archive.read(prefix + name), 0o644) for name in present}


def without(left_out: Patch, series: Series, released: Files) -> Files:
    """Return the files that ``left_out`` changes as the rest of the series leaves them.

    ``released`` are the `files_to_patch`. `UserError` names a patch that does not apply without ``left_out``.
    """
    state, touched = dict(released), set(left_out.files)
    concerned = set()
    for patch in series.patches:
        if touched & set(patch.files):
            concerned.add(patch.name)
            touched |= set(patch.files)
    for patch in series.patches:
        if patch.name in concerned and patch is not left_out:
            apply(state, "", patch)
    return {name: state[name] for name in left_out.files}


def write_without_each(cell: Cell, out: Path) -> None:
    """Write, for each patch of a cell, the files `without` it to the folder ``out/<id of the patch>``."""
    lock = lockfile.path(cell).read_text(encoding="utf-8")
    for series in series_of(cell):
        hashes = locked_hashes(series.package, series.version, lock)
        released = files_to_patch(fetch_pristine(series.package, series.version, hashes), series)
        for patch in series.patches:
            _write(without(patch, series, released).items(), out / series.id_of(patch))


def _write(files: Iterable[tuple[str, WheelFile]], folder: Path) -> None:
    for name, file in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(file.content)
