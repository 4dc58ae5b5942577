"""Check that each patch may still be carried, applies to the pinned wheel, and can be left out."""

from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from fnmatch import fnmatch
from pathlib import Path

from packaging.version import Version

from scripts.errors import UserError
from scripts.locks import lockfile
from scripts.matrix.load import expand, load
from scripts.patches.apply import apply
from scripts.patches.leave_out import files_to_patch, without
from scripts.patches.pristine import locked_hashes
from scripts.patches.series import NOT_APPLIED, Patch, Series, series_of
from scripts.paths import ROOT

REMEDY = (
    "refresh it (patches/README.md: unpack the wheel, change it, git diff -U1), or drop the patch if "
    "upstream has the change"
)
SEPARATE = "it must apply without the others: patches/README.md, 'Each patch on its own'"


def expired(series: Series, today: date, tests: Mapping[str, str]) -> list[str]:
    """Why patches may not be carried on ``today``; ``tests`` are the existing tests: their text by path."""
    problems = []
    for patch in series.patches:
        where = _path(series, patch)
        if patch.review_by < today:
            problems.append(
                f"{where}: Review-By {patch.review_by} has passed: check whether upstream has the change "
                "by now; drop the patch, or set a new date"
            )
        applied = patch.header["Applied-Upstream"]
        if applied != NOT_APPLIED and Version(applied) <= Version(series.version):
            problems.append(
                f"{where}: upstream has it since {applied} (Applied-Upstream), the pin is {series.version}: "
                "drop the patch, or correct the field"
            )
        expected = f"{series.package}=={series.version}"
        if patch.header["Applies-To"] != expected:
            problems.append(f"{where}: Applies-To is {patch.header['Applies-To']!r}, expected {expected!r}")
        test, name = patch.header["Test"], series.id_of(patch)
        if test not in tests:
            problems.append(f"{where}: its test {test} does not exist")
        elif f'"{name}"' not in tests[test]:
            problems.append(f'{where}: no test of {test} proves it: expected the mark patch("{name}")')
    return problems


def unnamed_cells(series: Series, cells: Iterable[str]) -> list[str]:
    """Why ``Cells`` of patches is wrong: an image has all patches of a version, whatever the field is."""
    return [
        f"{_path(series, patch)}: Cells is {patch.header['Cells']!r}, and {cell} has the patch too"
        for patch in series.patches
        for cell in cells
        if not any(fnmatch(cell, "*" if name == "all" else name) for name in patch.header["Cells"].split())
    ]


def existing_tests() -> dict[str, str]:
    """The text of the patch tests by their paths, as headers name them."""
    files = (ROOT / "tests" / "patches").glob("test_*.py")
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}


def pinned() -> Iterator[tuple[Series, list[str]]]:
    """Each series of a locked cell, once, with the sha256 digests that the lock allows for its wheel."""
    seen = set()
    for cell in expand(load()):
        if not lockfile.path(cell).exists():
            continue
        text = lockfile.path(cell).read_text(encoding="utf-8")
        for series in series_of(cell):
            if (series.package, series.version) not in seen:
                seen.add((series.package, series.version))
                yield series, locked_hashes(series.package, series.version, text)


def misfits(wheel: Path, series: Series) -> tuple[list[str], list[str]]:
    """Errors (a patch that does not apply, alone or with others) and warnings (a hunk at another line).

    Each patch is left out once, and the rest of the series must apply without it.
    """
    released = files_to_patch(wheel, series)
    errors: list[str] = []
    warnings: list[str] = []
    state = dict(released)
    for patch in series.patches:
        try:
            moved = apply(state, "", patch).moved
        except UserError as problem:
            return [f"{_path(series)}/{problem}: {REMEDY}"], warnings
        warnings += [
            f"{_path(series, patch)}: {hunk}, not at the line in its header: review and refresh it"
            for hunk in moved
        ]
    for patch in series.patches:
        try:
            without(patch, series, released)
        except UserError as problem:
            errors.append(f"{_path(series)}/{problem} without {patch.name}: {SEPARATE}")
    return errors, warnings


def _path(series: Series, patch: Patch | None = None) -> str:
    return f"patches/{series.package}/{series.version}" + (f"/{patch.name}" if patch else "")
