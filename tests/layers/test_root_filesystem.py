"""The base root filesystem: the locked Debian packages give the same tar, bit for bit."""

import tarfile
from pathlib import Path

import pytest
from docker.models.images import Image

from scripts.digests import sha256_file
from scripts.images import rootfs
from scripts.images.rootfs import Root
from scripts.matrix.load import Cell


@pytest.fixture(scope="module")
def root(cell: Cell) -> Root:
    """The runtime root of the cell."""
    runtime, _ = rootfs.roots(cell)
    return runtime


@pytest.fixture(scope="module")
def rebuilt(root: Root, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tar of the root, built in another folder and later than that of the image."""
    tar = tmp_path_factory.mktemp("root") / "root.tar"
    rootfs.make(root, tar)
    return tar


@pytest.mark.timeout(600)
def test_a_rebuilt_root_is_that_of_the_image(root: Root, rebuilt: Path, image: Image) -> None:
    """Also when Debian has newer packages by then: every package is the locked one."""
    assert image.labels["org.opencontainers.image.base.name"] == rootfs.tag(root, sha256_file(rebuilt))
    assert rootfs.installed(rebuilt) == {f"{deb.name}={deb.version}" for deb in root.locked}


@pytest.mark.timeout(600)
def test_root_has_nothing_of_the_build_machine(root: Root, rebuilt: Path) -> None:
    """The root contains no host name, resolver, machine id or log."""
    with tarfile.open(rebuilt) as archive:
        members = {member.name: member for member in archive}
    assert "./etc/hostname" not in members
    assert "./etc/resolv.conf" not in members
    assert members["./etc/machine-id"].size == 0
    assert {member.mtime for member in members.values() if member.mtime > root.epoch} == set()
