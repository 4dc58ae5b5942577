"""Root filesystems: the same tar from different tools, their tags, and mmdebstrap's errors."""

import io
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.errors import UserError
from scripts.images import rootfs
from scripts.matrix.load import expand, find, load

EPOCH = 1_000_000_000
DEFAULT = next(cell for cell in expand(load()) if cell.is_default)


def tar(path: Path, folder_time: int, form: int) -> Path:
    """A small root with one of each kind of file."""
    with tarfile.open(path, "w", format=form) as archive:
        for name, kind in {"./d": tarfile.DIRTYPE, "./d/f": tarfile.REGTYPE, "./l": tarfile.SYMTYPE,
                           "./h": tarfile.LNKTYPE}.items():  # fmt: skip
            member = tarfile.TarInfo(name)
            member.type, member.mode, member.mtime = kind, 0o755, 5
            member.linkname = "./d/f" if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
            if kind == tarfile.DIRTYPE:
                member.mtime = folder_time
            member.size = 3 if kind == tarfile.REGTYPE else 0
            archive.addfile(member, io.BytesIO(b"abc") if member.size else None)
    return path


def test_roots_of_different_tools_are_identical(tmp_path: Path) -> None:
    first = tar(tmp_path / "first", 7, tarfile.GNU_FORMAT)
    second = tar(tmp_path / "second", 8, tarfile.PAX_FORMAT)
    assert first.read_bytes() != second.read_bytes()
    for path in (first, second):
        rootfs.normalise(path, path.with_suffix(".tar"), EPOCH)
    assert first.with_suffix(".tar").read_bytes() == second.with_suffix(".tar").read_bytes()


def test_normalising_keeps_the_content(tmp_path: Path) -> None:
    source, target = tar(tmp_path / "source", 7, tarfile.GNU_FORMAT), tmp_path / "target"
    rootfs.normalise(source, target, EPOCH)
    with tarfile.open(target) as archive:
        found = {member.name: (member.type, member.mtime, member.linkname) for member in archive}
        file = archive.extractfile("./d/f")
        assert file is not None
        assert file.read() == b"abc"
    assert found == {
        "./d": (tarfile.DIRTYPE, EPOCH, ""),
        "./d/f": (tarfile.REGTYPE, 5, ""),
        "./l": (tarfile.SYMTYPE, 5, "./d/f"),
        "./h": (tarfile.LNKTYPE, 5, "./d/f"),
    }


def test_missing_user_namespaces_are_explained() -> None:
    message = rootfs.reason(
        "I: x\nE: unable to pick chroot mode automatically (use --mode for manual selection)"
    )
    assert "uidmap" in message
    assert "log in again" in message


def test_roots_differ_where_their_recipe_does() -> None:
    """Another package or date is another tar; the same recipe is the same file."""
    runtime, builder = rootfs.roots(DEFAULT)
    assert runtime.tar != builder.tar
    assert runtime.tar == rootfs.roots(DEFAULT)[0].tar
    assert replace(runtime, epoch=runtime.epoch + 1).tar != runtime.tar
    assert set(runtime.packages) < set(builder.packages)


def test_a_variant_s_build_tools_are_in_its_own_builder_root() -> None:
    """The other cells of the base keep their roots, and the variant's images have no more than theirs."""
    matrix = load()
    rocm, cuda = (find(matrix, f"ray2.12.0-vllm0.4.2-{name}") for name in ("rocm6.1", "cuda12.1"))
    assert rootfs.roots(rocm)[0].tar == rootfs.roots(cuda)[0].tar
    added = set(rootfs.roots(rocm)[1].packages) - set(rootfs.roots(cuda)[1].packages)
    assert added == {"ninja-build", "patchelf", "perl"}


def test_an_unreachable_mirror_is_reported() -> None:
    """The message that a user can act on, out of mmdebstrap's many lines."""
    output = (
        "I: running apt-get update...\nE: Failed to fetch http://x  Could not resolve\nW: hook\nE: second\n"
    )
    assert rootfs.reason(output).startswith("E: Failed to fetch")
    assert "check the network" in rootfs.reason(output)


def test_a_missing_mmdebstrap_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that says what to install, and no file."""
    monkeypatch.setenv("PATH", str(tmp_path))
    runtime, _ = rootfs.roots(DEFAULT)
    with pytest.raises(UserError, match="apt-get install mmdebstrap"):
        rootfs.make(runtime, tmp_path / "root.tar")
    assert list(tmp_path.iterdir()) == []
