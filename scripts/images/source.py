"""The digest of a cell's sources: everything in this repository that determines the inputs of its build.

The inputs digest needs downloaded wheels and root filesystems; this one needs the checkout alone, so lint
computes it for every cell in milliseconds. Other sources may give the same inputs, for example after a
changed comment in the code that lays out the context; ``python -m scripts catalogue`` then records that.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from scripts.digests import sha256, sha256_file
from scripts.locks import debian, lockfile
from scripts.matrix.load import Cell
from scripts.patches.series import series_of
from scripts.paths import ROOT

ALWAYS = ("Dockerfile", "base", "rootfs", "tools", "runtime/pyproject.toml", "runtime/rlhf_stack")
CODE = ("images", "patches", "locks")  # packages of scripts that turn the files below into a build's inputs


def source_digest(cell: Cell) -> str:
    """Return the sha256, in hex, of the cell's sources in this checkout.

    These are the cell with every reference resolved, its lock and that of its base, its patches, the host's
    uv, the files of ``images/`` that it uses, and the code that lays them out.
    """
    return sha256(
        msgspec.json.encode(
            {
                "cell": msgspec.structs.replace(cell, tag=cell.id),  # RLHF_STACKS_IMAGE changes the tag
                "patches": [
                    (s.package, s.version, s.revision, [(p.name, p.header, p.diff) for p in s.patches])
                    for s in series_of(cell)
                ],
                "uv": [entry.block for entry in _host_lock() if entry.name == "uv"],
                "files": {str(file.relative_to(ROOT)): _content(file) for file in _files(cell)},
            },
            order="sorted",
        )
    )


def _files(cell: Cell) -> Iterator[Path]:
    images, scripts = ROOT / "images", ROOT / "scripts"
    named = [name for build in cell.build_from_source for name in (build.recipe, build.edit) if name]
    recipes = [f"sources/{name}" for name in named]
    vendor = ["vendor"] if any(source.image for source in cell.sources) else []
    yield from (file for file in (lockfile.path(cell), debian.path(cell.base)) if file.exists())
    for top in (
        *(images / name for name in (*ALWAYS, *recipes, *vendor)),
        *(scripts / name for name in CODE),
    ):
        yield from ([top] if top.is_file() else _below(top))


def _below(folder: Path) -> Iterator[Path]:
    found = (path for path in folder.rglob("*") if path.is_file() or path.is_symlink())
    return (path for path in found if path.suffix != ".pyc")


def _content(file: Path) -> str:
    """Return what a build uses of a file: a link's target, or whether it is executable, and its sha256."""
    if file.is_symlink():
        return f"link {file.readlink()}"
    return f"{'executable' if file.stat().st_mode & 0o100 else 'file'} {sha256_file(file)}"


def _host_lock() -> tuple[lockfile.Entry, ...]:
    return lockfile.parse(lockfile.HOST.read_text(encoding="utf-8"))
