"""Neither the host's CA bundle nor its pip configuration is in any layer, nor in the image's history."""

import io
import json
import tarfile
from collections.abc import Iterator

import pytest
from docker.models.images import Image

from scripts.images.build import LEAK_MARKER

CHUNK = 1 << 22


def contains(chunks: Iterator[bytes], marker: bytes) -> bool:
    """Return whether ``marker`` is in the stream, also across two chunks."""
    rest = b""
    for chunk in chunks:
        text = rest + chunk
        if marker in text:
            return True
        rest = text[-len(marker) :]
    return False


def test_the_search_finds_a_marker() -> None:
    """The search finds a marker across the edge of a chunk, and in a layer as Docker writes it."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        member = tarfile.TarInfo("run/secrets/ca")
        member.size = len(LEAK_MARKER)
        archive.addfile(member, io.BytesIO(LEAK_MARKER.encode()))
    content = packed.getvalue()
    assert contains(iter([content]), LEAK_MARKER.encode())
    middle = content.index(LEAK_MARKER.encode()) + 5
    assert contains(iter([content[:middle], content[middle:]]), LEAK_MARKER.encode())
    assert not contains(iter([content[:middle]]), LEAK_MARKER.encode())


@pytest.mark.timeout(600)
def test_no_layer_contains_a_build_secret(image: Image) -> None:
    """Each build secret starts with a marker, which no file of the saved image contains."""
    assert not contains(image.save(chunk_size=CHUNK), LEAK_MARKER.encode())


def test_history_and_configuration_contain_no_secret(image: Image) -> None:
    """They contain no build argument that could hold a secret either, such as a proxy with a password."""
    text = json.dumps([image.history(), image.attrs])
    assert LEAK_MARKER not in text
    assert "_proxy=" not in text.lower()
