"""The base root filesystem: the same Debian packages give the same tar, bit for bit."""

import tarfile
from pathlib import Path

import pytest

from scripts.digests import sha256_file
from scripts.images import rootfs
from scripts.matrix.load import Cell

MANIFEST = "./etc/rlhf-stack-base.txt"


def packages(tar: Path) -> str:
    """Return the packages in a root filesystem, with versions."""
    with tarfile.open(tar) as archive:
        file = archive.extractfile(MANIFEST)
        assert file is not None
        return file.read().decode()


@pytest.mark.timeout(600)
def test_a_rebuilt_root_is_identical(cell: Cell, tmp_path: Path) -> None:
    """The root is rebuilt in another folder and later; twice if Debian has newer packages."""
    runtime, _ = rootfs.roots(cell)
    first, second = runtime.tar, tmp_path / "second.tar"
    rootfs.make(runtime, second)
    if not first.exists() or packages(first) != packages(second):
        first = tmp_path / "first.tar"
        rootfs.make(runtime, first)
    assert packages(first) == packages(second)
    assert sha256_file(first) == sha256_file(second)


def test_root_has_nothing_of_the_build_machine(cell: Cell) -> None:
    """The root contains no host name, resolver, machine id or log."""
    runtime, _ = rootfs.roots(cell)
    with tarfile.open(runtime.tar) as archive:
        members = {member.name: member for member in archive}
    assert "./etc/hostname" not in members
    assert "./etc/resolv.conf" not in members
    assert members["./etc/machine-id"].size == 0
    assert {member.mtime for member in members.values() if member.mtime > runtime.epoch} == set()
