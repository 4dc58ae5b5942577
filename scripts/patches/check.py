"""Check that each patch may still be carried, applies to the pinned wheel, and can be left out."""

import zipfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path

from packaging.version import Version

from scripts.errors import UserError
from scripts.locks import lockfile
from scripts.matrix.load import expand, load
from scripts.patches.apply import apply, site_packages
from scripts.patches.pristine import locked_hashes
from scripts.patches.series import NOT_APPLIED, Patch, Series, series_of
from scripts.patches.wheel_files import Files, WheelFile
from scripts.paths import ROOT

REMEDY = (
    "refresh it (patches/README.md: unpack the wheel, change it, git diff -U1), or drop the patch if "
    "upstream has the change"
)
SEPARATE = "it must apply without the others: patches/README.md, 'Each patch on its own'"


def expired(series: Series, today: date, tests: set[str]) -> list[str]:
    """Why patches may not be carried on ``today``; ``tests`` are the paths of the existing tests."""
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
        if patch.header["Test"] not in tests:
            problems.append(f"{where}: its test {patch.header['Test']} does not exist")
    return problems


def existing_tests() -> set[str]:
    """The paths of the patch tests, as headers name them."""
    return {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "patches").glob("test_*.py")}


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
    prefix, files = _patched_files(wheel, series)
    errors: list[str] = []
    warnings: list[str] = []
    state = dict(files)
    for patch in series.patches:
        try:
            moved = apply(state, prefix, patch).moved
        except UserError as problem:
            return [f"{_path(series)}/{problem}: {REMEDY}"], warnings
        warnings += [
            f"{_path(series, patch)}: {hunk}, not at the line in its header: review and refresh it"
            for hunk in moved
        ]
    for without in series.patches:
        errors += _misfits_without(without, series, prefix, files)
    return errors, warnings


def _misfits_without(without: Patch, series: Series, prefix: str, files: Files) -> list[str]:
    """The first patch that does not apply when ``without`` is left out; only its files can be concerned."""
    state = dict(files)
    concerned = {without.name}
    touched = set(without.files)
    for patch in series.patches:
        if touched & set(patch.files):
            concerned.add(patch.name)
            touched |= set(patch.files)
    for patch in series.patches:
        if patch.name in concerned and patch is not without:
            try:
                apply(state, prefix, patch)
            except UserError as problem:
                return [f"{_path(series)}/{problem} without {without.name}: {SEPARATE}"]
    return []


def _patched_files(wheel: Path, series: Series) -> tuple[str, Files]:
    """Where site-packages is in a wheel, and the files of it that the series changes."""
    changed = {name for patch in series.patches for name in patch.files}
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        prefix = site_packages(wheel.name, names)
        present = [prefix + name for name in changed if prefix + name in names]
        return prefix, {name: WheelFile(archive.read(name), 0o644) for name in present}


def _path(series: Series, patch: Patch | None = None) -> str:
    return f"patches/{series.package}/{series.version}" + (f"/{patch.name}" if patch else "")
