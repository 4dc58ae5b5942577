"""Which files of the image its users can write to."""

import io
import tarfile

import docker
import pytest
from docker.models.images import Image

from tests.layers.streams import Stream

USER, OTHER_USER = 1000, 12345
GROUP = 0  # of the image's user, and of any other user id on OpenShift
WRITABLE = ("opt/venv", "opt/rlhf-stack", "home", "tmp", "var/tmp")


def may_write(member: tarfile.TarInfo) -> bool:
    """Whether the image's user, or an unknown user in group 0 or none, has write permission."""
    by_owner = member.uid in (USER, OTHER_USER) and member.mode & 0o200
    by_group = member.gid == GROUP and member.mode & 0o020
    return bool(by_owner or by_group or member.mode & 0o002)


def test_permission_bits_are_understood() -> None:
    def member(mode: int, uid: int = 0, gid: int = 0) -> tarfile.TarInfo:
        found = tarfile.TarInfo("usr")
        found.mode, found.uid, found.gid = mode, uid, gid
        return found

    assert may_write(member(0o775))
    assert may_write(member(0o757, gid=4))
    assert may_write(member(0o755, uid=USER))
    assert not may_write(member(0o755))
    assert not may_write(member(0o775, gid=4))


@pytest.mark.timeout(600)
def test_users_can_write_to_their_own_folders_alone(client: docker.DockerClient, image: Image) -> None:
    """Users cannot write to /usr, /etc or the entrypoint, whatever the umask of the checkout was."""
    container = client.containers.create(image)
    try:
        chunks = iter(container.export())  # bytes; docker's stubs say text
        stream = io.BufferedReader(Stream(chunks), 1 << 20)  # type: ignore[arg-type]
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            members = [m for m in archive if (m.isfile() or m.isdir()) and may_write(m)]
    finally:
        container.remove()
    outside = [
        m.name for m in members if not any(m.name == w or m.name.startswith(f"{w}/") for w in WRITABLE)
    ]
    assert outside == []
