"""Root filesystems: the same tar from different tools, their tags, and mmdebstrap's errors."""

import io
import shutil
import subprocess
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from scripts.digests import sha256
from scripts.errors import UserError
from scripts.images import repository, rootfs
from scripts.locking import exclusive_lock
from scripts.locks import debian
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
    assert "as root" not in message, "nox runs as the owner of the checkout then too"


def test_roots_differ_where_their_recipe_does() -> None:
    """Another package, lock or date is another tar; the same recipe is the same file."""
    runtime, builder = rootfs.roots(DEFAULT)
    assert runtime.tar != builder.tar
    assert runtime.tar == rootfs.roots(DEFAULT)[0].tar
    assert replace(runtime, epoch=runtime.epoch + 1).tar != runtime.tar
    assert set(runtime.packages) < set(builder.packages)
    newer = replace(runtime.locked[0], sha256="0" * 64)
    assert replace(runtime, locked=(newer, *runtime.locked[1:])).tar != runtime.tar


def test_another_way_to_normalise_is_another_tar(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = rootfs.roots(DEFAULT)[0]
    before = runtime.tar

    def normalise(source: Path, target: Path, epoch: int) -> None:
        del epoch
        shutil.copy(source, target)

    monkeypatch.setattr(rootfs, "normalise", normalise)
    assert runtime.tar != before


def test_a_variant_s_build_tools_are_in_its_own_builder_root() -> None:
    """The other cells of the base keep their roots, and the variant's images have no more than theirs."""
    matrix = load()
    rocm, cuda = (find(matrix, f"ray2.12.0-vllm0.4.2-{name}") for name in ("rocm6.1", "cuda12.1"))
    assert rootfs.roots(rocm)[0].tar == rootfs.roots(cuda)[0].tar
    added = set(rootfs.roots(rocm)[1].packages) - set(rootfs.roots(cuda)[1].packages)
    assert added == {"patchelf", "perl"}
    locked = [{deb.name for deb in rootfs.roots(cell)[1].locked} for cell in (rocm, cuda)]
    assert added <= locked[0] - locked[1]
    assert locked[1] < locked[0]


def test_mmdebstrap_installs_from_the_locked_packages_alone(tmp_path: Path) -> None:
    """Its only source is their repository; users of the image install from Debian's archive."""
    runtime, _ = rootfs.roots(DEFAULT)
    *_, hook, suite, target, source = rootfs.command(runtime, tmp_path / "root.tar", tmp_path)
    assert (suite, target) == (runtime.base.suite, str(tmp_path / "root.tar"))
    assert source == f"deb [trusted=yes] copy:{tmp_path} ./"
    (tmp_path / "etc" / "apt").mkdir(parents=True)
    subprocess.run(["sh", "-c", hook.partition("=")[2], "hook", str(tmp_path)], check=True)
    assert (tmp_path / "etc" / "apt" / "sources.list").read_text() == debian.sources(runtime.base)


def test_a_root_that_differs_from_its_lock_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example one without a locked package that no other package requires any more."""
    runtime, _ = rootfs.roots(DEFAULT)
    runtime = replace(runtime, locked=runtime.locked[:2])
    manifest = f"{runtime.locked[0].name}={runtime.locked[0].version}\n".encode()

    def debootstrap(arguments: list[str], _: dict[str, str]) -> tuple[int, str]:
        with tarfile.open(arguments[-2], "w") as archive:
            member = tarfile.TarInfo(rootfs.MANIFEST)
            member.size = len(manifest)
            archive.addfile(member, io.BytesIO(manifest))
        return 0, ""

    monkeypatch.setattr(shutil, "which", lambda _: "mmdebstrap")
    monkeypatch.setattr(rootfs, "_run_until_cleaned_up", debootstrap)
    for name in ("fetch", "write"):
        monkeypatch.setattr(repository, name, lambda *_: None)
    lacking = f"{runtime.locked[1].name}={runtime.locked[1].version}"
    with pytest.raises(UserError, match=f"differ in {lacking}: run python -m scripts lock"):
        rootfs.make(runtime, tmp_path / "root.tar")
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_another_process_builds_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two sessions of nox would otherwise build the same root at the same time."""
    runtime, _ = rootfs.roots(DEFAULT)
    monkeypatch.setattr(rootfs, "DOWNLOADS", tmp_path)
    monkeypatch.setattr(rootfs, "make", MagicMock(side_effect=AssertionError("built twice")))
    monkeypatch.setattr(rootfs, "connect", MagicMock)
    with ThreadPoolExecutor(1) as pool:
        with exclusive_lock(tmp_path, "this test"):
            second = pool.submit(rootfs.image, runtime)
            while not second.done() and "waiting for" not in capsys.readouterr().out:
                threading.Event().wait(0.01)
            runtime.tar.write_bytes(b"root")
        assert second.result(timeout=60).endswith(f":{runtime.name}-{sha256(b'root')[:12]}")


def test_a_missing_mmdebstrap_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that says what to install, and no file."""
    monkeypatch.setenv("PATH", str(tmp_path))
    runtime, _ = rootfs.roots(DEFAULT)
    with pytest.raises(UserError, match="apt-get install mmdebstrap"):
        rootfs.make(runtime, tmp_path / "root.tar")
    assert list(tmp_path.iterdir()) == []
