"""Read the patches: ``patches/<package>/<version>/series`` and the files that it lists.

``series`` holds ``Revision: N`` (the N of ``+stack.N``) and the names of the patches in their order. A patch
is a DEP-3 header, a line ``---`` and a unified diff whose paths are relative to site-packages. Headers are
parsed here, since python-debian ignores malformed and repeated fields. See patches/README.md.
"""

import re
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from packaging.version import InvalidVersion, Version

from scripts.errors import UserError
from scripts.matrix.model import Cell
from scripts.paths import ROOT

PATCHES = ROOT / "patches"
FIELDS = (
    "Description",
    "Kind",
    "Origin",
    "Bug",
    "Forwarded",
    "Applied-Upstream",
    "Last-Update",
    "Applies-To",
    "Cells",
    "Test",
    "Review-By",
)
KINDS = ("fix", "feature", "support")
NOT_APPLIED = "no"
DATES = ("Last-Update", "Review-By")
PATCH_NAME = re.compile(r"^\d{4}-[a-z0-9]+(-[a-z0-9]+)*\.patch$")
REVISION = re.compile(r"^Revision: ([1-9]\d*)$")
TARGET = re.compile(r"^\+\+\+ b/(\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Patch:
    """One patch: ``header`` has every name in `FIELDS`, ``files`` are the paths that ``diff`` changes."""

    name: str
    header: dict[str, str]
    diff: str
    files: tuple[str, ...]

    @property
    def title(self) -> str:
        """The first line of the description."""
        return self.header["Description"].splitlines()[0]

    @property
    def review_by(self) -> date:
        """The last day on which the patch is valid without a review."""
        return date.fromisoformat(self.header["Review-By"])


@dataclass(frozen=True)
class Series:
    """All patches of one version of one package."""

    package: str
    version: str
    revision: int
    patches: tuple[Patch, ...]

    @property
    def label(self) -> str:
        """The local version of the patched package."""
        return f"stack.{self.revision}"

    def id_of(self, patch: Patch) -> str:
        """The path of a patch of this series below ``patches/``, without its suffix."""
        return f"{self.package}/{self.version}/{Path(patch.name).stem}"


def parse_patch(name: str, text: str) -> Patch:
    """Parse a patch; UserError names the file and the mistake in its header or diff."""
    if not PATCH_NAME.match(name):
        raise UserError(f"{name}: expected a name such as 0001-what-it-does.patch")
    head, separator, diff = text.partition("\n---\n")
    if not separator:
        raise UserError(f"{name}: expected a header, a line '---' and a diff")
    header: dict[str, str] = {}
    field = ""
    for number, line in enumerate(head.splitlines(), start=1):
        if line.startswith(" ") and field:
            header[field] += "\n" + line[1:]
            continue
        field, colon, value = line.partition(":")
        if not colon or field not in FIELDS:
            raise UserError(f"{name}:{number}: unknown field {field!r}; expected {', '.join(FIELDS)}")
        if field in header:
            raise UserError(f"{name}:{number}: field {field} appears twice")
        header[field] = value.strip()
    missing = [field for field in FIELDS if not header.get(field)]
    if missing:
        raise UserError(f"{name}: the header lacks {', '.join(missing)}")
    if header["Kind"] not in KINDS:
        raise UserError(f"{name}: Kind: {header['Kind']!r}: expected {', '.join(KINDS)}")
    for field in DATES:
        try:
            date.fromisoformat(header[field])
        except ValueError:
            raise UserError(
                f"{name}: {field}: {header[field]!r}: expected a date such as 2026-11-21"
            ) from None
    try:
        applied = header["Applied-Upstream"]
        Version("0" if applied == NOT_APPLIED else applied)
    except InvalidVersion:
        raise UserError(
            f"{name}: Applied-Upstream: {applied!r}: expected no, or a release such as 0.12.0"
        ) from None
    files = tuple(dict.fromkeys(TARGET.findall(diff)))
    if not files:
        raise UserError(f"{name}: the diff changes no file (expected lines '+++ b/<path in site-packages>')")
    return Patch(name, header, diff, files)


def parse_series(package: str, version: str, text: str, contents: dict[str, str]) -> Series:
    """Parse a series with the patches of its directory, ``contents`` by file name."""
    where = f"{package}/{version}/series"
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    revision = REVISION.match(lines[0]) if lines else None
    if revision is None:
        raise UserError(f"{where}: expected 'Revision: N' in the first line")
    names = lines[1:]
    unlisted = sorted(set(contents) - set(names))
    absent = sorted(set(names) - set(contents))
    if unlisted or absent or len(set(names)) != len(names):
        raise UserError(
            f"{where}: must list every patch of its directory once; not listed: {unlisted}, missing: {absent}"
        )
    if names != sorted(names):
        raise UserError(f"{where}: the patches must be in the order of their numbers")
    patches = tuple(parse_patch(name, contents[name]) for name in names)
    return Series(package, version, int(revision[1]), patches)


def load_series(package: str, version: str, root: Path = PATCHES) -> Series | None:
    """The series of a package's version, or None if the package is not patched."""
    directory = root / package / version
    return _load(package, directory) if (directory / "series").is_file() else None


def load_all() -> list[Series]:
    """Every series in the repository."""
    directories = [path.parent for path in sorted(PATCHES.glob("*/*/series"))]
    return [_load(directory.parent.name, directory) for directory in directories]


def _load(package: str, directory: Path) -> Series:
    contents = {path.name: path.read_text(encoding="utf-8") for path in sorted(directory.glob("*.patch"))}
    listing = (directory / "series").read_text(encoding="utf-8")
    return parse_series(package, directory.name, listing, contents)


def series_of(cell: Cell) -> list[Series]:
    """The series of all packages that a cell pins."""
    found = (load_series(package.distribution, package.version) for package in cell.packages)
    return [series for series in found if series is not None]
