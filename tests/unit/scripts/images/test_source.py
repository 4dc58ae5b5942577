"""The digest of a cell's sources changes with everything from which its build's inputs are made."""

from pathlib import Path

import msgspec
import pytest

from scripts.images import source
from scripts.locks import lockfile
from scripts.matrix.load import expand, load
from scripts.patches import series
from scripts.paths import ROOT

CELLS = expand(load())
CELL = next(cell for cell in CELLS if cell.is_default)
IMAGES = (
    *("Dockerfile", "base/customize.sh", "tools/new", "rootfs/etc/new", "runtime/pyproject.toml"),
    "runtime/rlhf_stack/__init__.py",
)
OTHERS = (
    "images/README.md",
    "images/examples/Dockerfile",
    "images/locks/other.txt",
    "scripts/release/new.py",
)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with little in it."""
    names = [f"images/{name}" for name in IMAGES] + [*OTHERS, "scripts/images/context.py"]
    for name in (*names, "scripts/patches/x.py", "scripts/locks/x.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("", encoding="utf-8")
    for module, name, value in (
        (source, "ROOT", tmp_path),
        (lockfile, "LOCKS", tmp_path / "images" / "locks"),
        (lockfile, "HOST", tmp_path / "host.txt"),
    ):
        monkeypatch.setattr(module, name, value)
    (tmp_path / "host.txt").write_text("uv==1 \\\n    --hash=sha256:0\n", encoding="utf-8")
    lockfile.path(CELL).write_text("", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        *(f"images/{name}" for name in IMAGES),
        f"images/locks/{CELL.lock}.txt",
        f"images/locks/{CELL.base.name}.txt",
        "host.txt",
        "scripts/images/context.py",
        "scripts/patches/x.py",
        "scripts/locks/x.py",
        "images/rootfs/etc/another",
    ],
)
def test_a_changed_file_changes_the_digest(name: str, root: Path) -> None:
    before = source.source_digest(CELL)
    with (root / name).open("a", encoding="utf-8") as file:
        file.write("uv==2\n")
    assert source.source_digest(CELL) != before


def test_the_executable_bit_changes_the_digest_and_other_modes_do_not(root: Path) -> None:
    """The context normalises modes in the same way."""
    before = source.source_digest(CELL)
    (root / "images" / "tools" / "new").chmod(0o664)
    assert source.source_digest(CELL) == before
    (root / "images" / "tools" / "new").chmod(0o755)
    assert source.source_digest(CELL) != before


@pytest.mark.parametrize("name", OTHERS)
def test_what_no_build_reads_does_not_change_the_digest(name: str, root: Path) -> None:
    before = source.source_digest(CELL)
    (root / name).write_text("other", encoding="utf-8")
    assert source.source_digest(CELL) == before


def test_the_cell_and_its_patches_change_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name under which this machine tags images does not change it."""
    before = source.source_digest(CELL)
    assert len({source.source_digest(cell) for cell in CELLS}) == len(CELLS)
    assert source.source_digest(msgspec.structs.replace(CELL, tag="x")) == before
    assert source.source_digest(msgspec.structs.replace(CELL, python="3.0")) != before
    patched = series.series_of(CELL)
    monkeypatch.setattr(source, "series_of", lambda _: patched[1:])
    assert source.source_digest(CELL) != before


def test_every_recipe_of_a_cell_is_a_source() -> None:
    for cell in CELLS:
        found = {str(file.relative_to(ROOT)) for file in source._files(cell)}
        for build in cell.build_from_source:
            for folder in filter(None, (build.recipe, build.edit)):
                assert any(f"images/sources/{folder}/" in name for name in found)
