"""Remove installed files that are never used, and strip debug symbols from libraries.

``python trim.py LIST SITE_PACKAGES``: each line of LIST is ``remove GLOB`` or ``strip GLOB``, relative to
SITE_PACKAGES. RECORD is rewritten, so that it agrees with the installed files.
"""

import base64
import csv
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

ELF = b"\x7fELF"
LIBRARIES = "/builder/usr/lib/x86_64-linux-gnu"


def matches(path: str, patterns: list[str]) -> bool:
    """Return whether ``path`` or a parent folder matches a pattern (``*`` does not match a slash)."""
    parts = path.split("/")
    return any(
        len(globs := pattern.split("/")) <= len(parts)
        and all(fnmatchcase(part, glob) for part, glob in zip(parts, globs, strict=False))
        for pattern in patterns
    )


def remove(path: Path) -> None:
    """Remove a file or a folder."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def has_symbols(path: Path) -> bool:
    """Return whether a file is an ELF file with a symbol table for debuggers."""
    if not path.is_file() or path.is_symlink() or path.open("rb").read(4) != ELF:
        return False
    return b" .symtab " in builder("readelf", "--sections", "--wide", str(path))


def builder(tool: str, *arguments: str) -> bytes:
    """Run a tool of the builder's root, mounted at /builder, and return its output."""
    command = [f"/builder/usr/bin/{tool}", *arguments]
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, env={"LD_LIBRARY_PATH": LIBRARIES}
    ).stdout


def strip(path: Path) -> None:
    """Strip one file in place."""
    builder("strip", "--strip-unneeded", str(path))


def trimmed(row: list[str], changed: set[str], site_packages: Path) -> list[str]:
    """Return a row of RECORD with the current hash and size if the file was changed."""
    if row[0] not in changed:
        return row
    content = (site_packages / row[0]).read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return [row[0], f"sha256={digest}", str(len(content))]


def rewrite(record: Path, patterns: list[str], changed: set[str], site_packages: Path) -> None:
    """Update a RECORD if its files were removed or changed."""
    with record.open(newline="") as file:
        rows = list(csv.reader(file))
    kept = [trimmed(row, changed, site_packages) for row in rows if not matches(row[0], patterns)]
    if kept != rows:
        with record.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(kept)


def found(site_packages: Path, patterns: list[str]) -> Iterator[Path]:
    """Yield each path that matches a pattern, once."""
    yield from sorted({path for pattern in patterns for path in site_packages.glob(pattern)})


def main() -> None:
    """Apply the actions of LIST."""
    lines = [line.split(maxsplit=1) for line in Path(sys.argv[1]).read_text().splitlines()]
    site_packages = Path(sys.argv[2])
    removals = [glob for action, glob in lines if action == "remove"]
    for path in found(site_packages, removals):
        remove(path)
    strips = [glob for action, glob in lines if action == "strip"]
    symbols = [path for path in found(site_packages, strips) if has_symbols(path)]
    for path in symbols:
        strip(path)
    changed = {str(path.relative_to(site_packages)) for path in symbols}
    for record in site_packages.glob("*.dist-info/RECORD"):
        rewrite(record, removals, changed, site_packages)


if __name__ == "__main__":
    main()
