"""Whether every hunk of every patch fits the package that the locks pin: ``python -m scripts.patches.check``.

The wheels as released are those of the build; one that is not here yet is downloaded. Where no index can be
reached that is said, and the build will find out.
"""

import sys
import zipfile
from pathlib import Path

from scripts.errors import UserError, run
from scripts.images import wheels
from scripts.images.image_build import series_of
from scripts.locks import lockfile
from scripts.matrix.load import expand, load
from scripts.patches.patch_series import Series

MEND = (
    "make it fit again (patches/README.md says how: unpack the wheel, change it, git diff -U1), or drop the "
    "patch if upstream has the change"
)


def check(wheel: Path, series: Series) -> None:
    """`UserError` with the patch and the hunk if one does not fit ``wheel`` exactly."""
    wanted = {name for patch in series.patches for name in patch.files}
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        prefix = wheels.site_packages(wheel.name, names)
        files = {
            prefix + name: wheels.Entry(archive.read(prefix + name), 0o644)
            for name in wanted
            if prefix + name in names
        }
    for patch in series.patches:
        try:
            wheels.apply(files, prefix, patch)
        except UserError as problem:
            raise UserError(f"patches/{series.package}/{series.version}/{problem}: {MEND}") from None


def locked() -> dict[tuple[str, str], tuple[Series, list[str]]]:
    """Each series of a cell that has a lock, by package and version, with the hashes that it allows."""
    found = {}
    for cell in expand(load()):
        if not lockfile.path(cell).exists():
            continue
        text = lockfile.path(cell).read_text(encoding="utf-8")
        for series in series_of(cell):
            hashes = wheels.locked_hashes(series.package, series.version, text)
            found[series.package, series.version] = series, hashes
    return found


def main() -> int:
    """Check all; 1 if a hunk does not fit."""
    code = 0
    for (package, version), (series, hashes) in locked().items():
        try:
            wheel = wheels.fetch_pristine(package, version, hashes)
        except UserError as problem:
            print(f"not checked whether the patches of {package} {version} fit: {problem}", file=sys.stderr)
            continue
        try:
            check(wheel, series)
        except UserError as problem:
            print(f"error: {problem}", file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    run(main)
