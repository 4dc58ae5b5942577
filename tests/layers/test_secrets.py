"""Neither the host's CA bundle nor its pip configuration is in any layer, nor in the image's history."""

import io
import json
import tarfile
from collections.abc import Iterator

import pytest
from docker.models.images import Image

from scripts.images.build import LEAK_MARKER

CHUNK = 1 << 22


def holds(chunks: Iterator[bytes], mark: bytes) -> bool:
    """Whether ``mark`` is in the stream, also across two chunks."""
    rest = b""
    for chunk in chunks:
        text = rest + chunk
        if mark in text:
            return True
        rest = text[-len(mark) :]
    return False


def chunks_of(file: io.BufferedIOBase) -> Iterator[bytes]:
    """The content of a file, piece by piece."""
    while chunk := file.read(CHUNK):
        yield chunk


def test_the_search_finds_a_mark_that_is_there() -> None:
    """Also on the edge of a chunk, and in a layer as Docker writes it."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        member = tarfile.TarInfo("run/secrets/ca")
        member.size = len(LEAK_MARKER)
        archive.addfile(member, io.BytesIO(LEAK_MARKER.encode()))
    content = packed.getvalue()
    assert holds(iter([content]), LEAK_MARKER.encode())
    middle = content.index(LEAK_MARKER.encode()) + 5
    assert holds(iter([content[:middle], content[middle:]]), LEAK_MARKER.encode())
    assert not holds(iter([content[:middle]]), LEAK_MARKER.encode())


@pytest.mark.timeout(600)
def test_no_layer_holds_a_secret_of_the_build(image: Image) -> None:
    """Each secret of a build starts with a mark, which no file that Docker saves contains."""
    assert not holds(image.save(chunk_size=CHUNK), LEAK_MARKER.encode())


def test_history_and_configuration_hold_no_secret(image: Image) -> None:
    """Nor an argument that would have carried one, such as a proxy with a password."""
    text = json.dumps([image.history(), image.attrs])
    assert LEAK_MARKER not in text
    assert "_proxy=" not in text.lower()
