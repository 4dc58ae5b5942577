"""A series without one of its patches: the files that differ, for the test of that patch alone."""

import zipfile
from pathlib import Path

from scripts.digests import sha256
from scripts.locks import lockfile
from scripts.matrix.model import Cell
from scripts.patches.apply import apply, site_packages
from scripts.patches.changes import mark
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


def write_without_each(cell: Cell, out: Path) -> dict[str, dict[str, list[str]]]:
    """Write what the tests of a cell's patches compare, and return the marks of each patch by change.

    ``out/without/<id of a patch>`` has the files `without` it, ``out/marked`` all patched files with marks
    (`patches.changes`), and ``out/digest`` the digest of the cell's lock and patches.
    """
    lock = lockfile.path(cell).read_text(encoding="utf-8")
    marks: dict[str, dict[str, list[str]]] = {}
    for series in series_of(cell):
        hashes = locked_hashes(series.package, series.version, lock)
        released = files_to_patch(fetch_pristine(series.package, series.version, hashes), series)
        whole = dict(released)
        before: dict[str, dict[str, str]] = {name: {} for name in released}
        for patch in series.patches:
            apply(whole, "", patch)
            for name, file in without(patch, series, released).items():
                before[name][series.id_of(patch)] = file.content.decode()
                _write(out / "without" / series.id_of(patch) / name, file.content)
        for name, file in whole.items():
            text, changes = mark(file.content.decode(), before[name], name)
            _write(out / "marked" / name, text.encode())
            for patch_id, found in changes.items():
                marks.setdefault(patch_id, {}).update(found)
    diffs = [patch.diff for series in series_of(cell) for patch in series.patches]
    _write(out / "digest", sha256("\0".join([lock, *diffs])).encode())
    return marks


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
