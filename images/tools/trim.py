"""Remove installed files that nobody runs, and strip libraries of the symbols that only a debugger reads.

``python trim.py LIST SITE_PACKAGES``: each line of LIST is ``remove GLOB`` or ``strip GLOB``, relative to
SITE_PACKAGES. RECORD is rewritten, so that what is installed and what its package says of it still agree.
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
    """Whether ``path``, or a folder above it, fits one of ``patterns`` (``*`` crosses no slash)."""
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
    """Whether a file is an ELF file with a symbol table that only a debugger reads."""
    if not path.is_file() or path.is_symlink() or path.open("rb").read(4) != ELF:
        return False
    return b" .symtab " in builder("readelf", "--sections", "--wide", str(path))


def builder(tool: str, *arguments: str) -> bytes:
    """What a tool of the builder's root, mounted at /builder, prints."""
    command = [f"/builder/usr/bin/{tool}", *arguments]
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, env={"LD_LIBRARY_PATH": LIBRARIES}
    ).stdout


def strip(path: Path) -> None:
    """Strip one file in place."""
    builder("strip", "--strip-unneeded", str(path))


def trimmed(row: list[str], changed: set[str], site_packages: Path) -> list[str]:
    """A row of RECORD, with the hash and size of a changed file made true."""
    if row[0] not in changed:
        return row
    content = (site_packages / row[0]).read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return [row[0], f"sha256={digest}", str(len(content))]


def rewrite(record: Path, patterns: list[str], changed: set[str], site_packages: Path) -> None:
    """Bring one RECORD in line, if it is concerned."""
    with record.open(newline="") as file:
        rows = list(csv.reader(file))
    kept = [trimmed(row, changed, site_packages) for row in rows if not matches(row[0], patterns)]
    if kept != rows:
        with record.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(kept)


def found(site_packages: Path, patterns: list[str]) -> Iterator[Path]:
    """What the patterns find, each path once."""
    yield from sorted({path for pattern in patterns for path in site_packages.glob(pattern)})


def main() -> None:
    """Trim what LIST names."""
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
