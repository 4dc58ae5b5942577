"""A registry on this machine, and small images in the place of a cell's, of which nothing stays behind."""

import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import docker
import msgspec
import pytest
from docker.models.images import Image

from scripts.git import DIRTY
from scripts.images.context import quoted
from scripts.images.inputs import INPUTS, NAMESPACE, REVISION, image_labels
from scripts.matrix.load import Cell
from scripts.paths import ROOT
from scripts.release.publish import Item
from scripts.testing import records
from tests.registry import server
from tests.registry.images import GIVEN, Make, layer, remove


@pytest.fixture(scope="session")
def registry() -> Iterator[server.Registry]:
    """A registry that lets everybody push."""
    with (
        tempfile.TemporaryDirectory(dir=ROOT / "build", prefix="registry-") as folder,
        server.running(Path(folder)) as running,
    ):
        yield running


@pytest.fixture
def repo(registry: server.Registry) -> str:
    """A repository that no other test has pushed to."""
    return f"{registry.host}/tests/{uuid.uuid4().hex}"


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Where the test records of the small images are."""
    return tmp_path / "records"


@pytest.fixture
def make(client: docker.DockerClient, cell: Cell, kept: Path) -> Iterator[Make]:
    """Make a small image that says of itself what the cell's would, and has all records.

    The arguments are labels that differ (``stand_in="torch"``), ``release``, ``revision`` and ``inputs``.
    """
    made: list[Image] = []

    def _make(
        release: str = cell.release, revision: str = "abc", stand_in: str = "", inputs: str = GIVEN
    ) -> Item:
        tag = f"rlhf-stacks-tests:{uuid.uuid4().hex}"
        changed = msgspec.structs.replace(cell, release=release, tag=tag)
        labels = {
            **image_labels(changed, "base", []),
            REVISION: revision,
            INPUTS: inputs,
        }
        labels |= {f"{NAMESPACE}.stand-in": stand_in} if stand_in else {}
        lines = [f"LABEL {name}={quoted(value)}" for name, value in labels.items()]
        repository, _, name = tag.partition(":")
        client.api.import_image_from_data(layer(), repository=repository, tag=name, changes=lines)
        image = client.images.get(tag)
        made.append(image)
        for suite in records.required(changed):
            with records.recording(cell.id, str(image.id), suite, kept) as tally:
                tally.passed = 1
            done = records.read(str(image.id), kept)[suite]
            clean = done.revision.removesuffix(DIRTY)
            records.write(msgspec.structs.replace(done, revision=clean), kept)
        return Item(changed, image)

    yield _make
    for image in made:
        remove(client, str(image.id))
