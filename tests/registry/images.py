"""Small images for tests, and their removal."""

import io
import os
import tarfile
from collections.abc import Callable

import docker
import docker.errors

from scripts.release.publish import Item

Make = Callable[..., Item]
LAYER_BYTES = 3_000_000
INPUTS_DIGEST = "inputs-digest"  # a substitute for the inputs digest


def layer() -> bytes:
    """Return a root filesystem with one file of random bytes, as a tar."""
    content, packed = os.urandom(LAYER_BYTES), io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        member = tarfile.TarInfo("content")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def remove(client: docker.DockerClient, image: str) -> None:
    """Remove a local image with all of its names, if it exists."""
    try:
        found = client.images.get(image)
    except docker.errors.ImageNotFound:
        return
    for name in (*found.tags, *found.attrs["RepoDigests"]):
        try:
            client.images.remove(name)
        except docker.errors.ImageNotFound:  # a digest is removed with the last tag of its repository
            continue
