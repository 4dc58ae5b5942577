"""Neither the host's CA bundle nor its pip configuration is in any layer, nor in the image's history."""

import gzip
import io
import json
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, cast

import certifi
import pytest
from docker.models.images import Image

from scripts.images.build import LEAK_MARKER, write_secrets
from scripts.locks import index_config
from scripts.locks.index_config import PipConfig
from tests.layers.streams import Stream

CHUNK = 1 << 22
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----\n(.+?)\n-----END", re.DOTALL)
SETTING = re.compile(rb"^[a-z-]+ = (.+)$", re.MULTILINE)
PUBLIC_INDEX = b"://pypi.org/"  # the default, which pip's own code names
PUBLIC_CERTIFICATES = Path(
    "/usr/share/ca-certificates"
)  # of the host's distribution; images may have them too


def found(saved: Iterable[bytes], words: set[bytes]) -> set[bytes]:
    """Return which ``words`` a saved image contains: in its metadata, or in a layer, packed or not."""
    longest, present = max(map(len, words)), set[bytes]()
    with tarfile.open(fileobj=io.BufferedReader(Stream(saved), CHUNK), mode="r|") as archive:
        for file in filter(None, map(archive.extractfile, archive)):
            rest = b""
            for chunk in unpacked(cast(io.BufferedReader, file)):
                text = rest + chunk
                present |= {word for word in words - present if word in text}
                rest = text[-longest:]
    return present


def unpacked(file: io.BufferedReader) -> Iterator[bytes]:
    """Yield the content of a file, which containerd's image store packs with gzip or zstd."""
    head = file.peek(len(ZSTD))
    if head.startswith(GZIP):
        with gzip.open(file) as text:
            yield from chunks(cast(IO[bytes], text))
    elif head.startswith(ZSTD):
        with tempfile.TemporaryFile() as packed, tempfile.TemporaryFile() as plain:
            packed.writelines(chunks(file))
            packed.seek(0)
            subprocess.run(["zstd", "--decompress", "--stdout"], stdin=packed, stdout=plain, check=True)
            plain.seek(0)
            yield from chunks(plain)
    else:
        yield from chunks(file)


def chunks(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the content of a file in parts of at most `CHUNK`."""
    return iter(lambda: file.read(CHUNK), b"")


def secret_words(config: PipConfig, folder: Path) -> set[bytes]:
    """Return words that only a leak of the build's secrets puts into an image.

    They are the marker with which each secret starts, the values of pip's configuration except the public
    index, and of each certificate that the host's distribution does not have, the last whole line.
    """
    texts = [path.read_bytes() for path in write_secrets(config, folder).values()]
    public = {*certificates(Path(certifi.where()).read_bytes())}
    for file in PUBLIC_CERTIFICATES.rglob("*.crt"):
        public |= certificates(file.read_bytes())
    values = {word for text in texts for value in SETTING.findall(text) for word in value.split()}
    own = {certificate for text in texts for certificate in certificates(text)} - public
    return {
        LEAK_MARKER.encode(),
        *(value for value in values if PUBLIC_INDEX not in value),
        *(certificate.splitlines()[-2] for certificate in own),
    }


def certificates(bundle: bytes) -> set[bytes]:
    """Return the lines of each certificate of a bundle."""
    return set(CERTIFICATE.findall(bundle))


def saved_image(layer: bytes, pack: Callable[[bytes], bytes]) -> bytes:
    """Return an image with one layer, as ``docker save`` writes it."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as saved:
        for name, content in (("index.json", b"{}"), ("blobs/sha256/0", pack(layer))):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            saved.addfile(member, io.BytesIO(content))
    return archive.getvalue()


def zstd(content: bytes) -> bytes:
    """Pack with zstd."""
    return subprocess.run(["zstd", "--stdout"], input=content, capture_output=True, check=True).stdout


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd], ids=["plain", "gzip", "zstd"])
@pytest.mark.parametrize("edge", [CHUNK, 1000])
def test_the_search_finds_a_secret_in_every_kind_of_layer(pack: Callable[[bytes], bytes], edge: int) -> None:
    """The secret crosses the edge of a chunk."""
    secret = b"https://user:password@index.example/simple"
    layer = bytes(edge - 7) + secret + bytes(CHUNK)
    saved = saved_image(layer, pack)
    parts = [saved[start : start + edge] for start in range(0, len(saved), edge)]
    assert found(parts, {secret, b"something else"}) == {secret}


def test_the_words_are_the_secrets_own(tmp_path: Path) -> None:
    """Not those of public certificates and of the public index, which an image contains anyway."""
    public = Path(certifi.where()).read_bytes()
    body = b"".join(b"%064d\n" % number for number in range(3))
    bundle = tmp_path / "bundle"
    bundle.write_bytes(public + b"-----BEGIN CERTIFICATE-----\n" + body + b"x==\n-----END CERTIFICATE-----\n")
    config = PipConfig(
        index="https://pypi.org/simple",
        extra=("https://user:password@a.example/simple", "https://b.example"),
        certificate=bundle,
    )
    assert secret_words(config, tmp_path) == {
        LEAK_MARKER.encode(),
        b"https://user:password@a.example/simple",
        b"https://b.example",
        b"%064d" % 2,
    }


@pytest.mark.timeout(600)
def test_no_layer_contains_a_build_secret(image: Image, tmp_path: Path) -> None:
    """Neither their marker nor the addresses and certificates in them."""
    assert found(image.save(chunk_size=CHUNK), secret_words(index_config.load(), tmp_path)) == set()


def test_history_and_configuration_contain_no_secret(image: Image, tmp_path: Path) -> None:
    """They contain no build argument that could hold a secret either, such as a proxy with a password."""
    text = json.dumps([image.history(), image.attrs])
    assert not [word for word in secret_words(index_config.load(), tmp_path) if word.decode() in text]
    assert "_proxy=" not in text.lower()
