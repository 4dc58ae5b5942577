"""A registry on this machine, and small substitutes for a cell's image, which the tests remove."""

import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import docker
import msgspec
import pytest
from docker.models.images import Image

from scripts.images.context import quoted
from scripts.images.inputs import INPUTS, NAMESPACE, REVISION, image_labels
from scripts.matrix.load import Cell
from scripts.paths import ROOT
from scripts.release.publish import Item
from scripts.testing import records
from scripts.testing.suite_digest import suite_digest
from tests.registry import server
from tests.registry.images import INPUTS_DIGEST, Make, layer, remove

JUNIT = '<testsuites><testsuite><testcase classname="a" name="b"/></testsuite></testsuites>'


@pytest.fixture(scope="session")
def registry() -> Iterator[server.Registry]:
    """Run a registry that accepts every push."""
    with (
        tempfile.TemporaryDirectory(dir=ROOT / "build", prefix="registry-") as folder,
        server.running(Path(folder)) as running,
    ):
        yield running


@pytest.fixture
def repo(registry: server.Registry) -> str:
    """Return a repository that no other test uses."""
    return f"{registry.host}/tests/{uuid.uuid4().hex}"


@pytest.fixture
def records_folder(tmp_path: Path) -> Path:
    """Return the folder of the small images' test records."""
    return tmp_path / "records"


@pytest.fixture
def make(client: docker.DockerClient, cell: Cell, records_folder: Path) -> Iterator[Make]:
    """Return a function that builds a small image with the labels and all records of the cell's.

    Its arguments are labels that differ: ``release``, ``revision``, ``stand_in`` and ``inputs``.
    """
    images: list[Image] = []

    def _make(
        release: str = cell.release, revision: str = "abc", stand_in: str = "", inputs: str = INPUTS_DIGEST
    ) -> Item:
        tag = f"rlhf-stacks-tests:{uuid.uuid4().hex}"
        changed = msgspec.structs.replace(cell, release=release, tag=tag)
        labels = {**image_labels(changed, "base", []), REVISION: revision, INPUTS: inputs}
        labels |= {f"{NAMESPACE}.stand-in": stand_in} if stand_in else {}
        lines = [f"LABEL {name}={quoted(value)}" for name, value in labels.items()]
        repository, _, name = tag.partition(":")
        client.api.import_image_from_data(layer(), repository=repository, tag=name, changes=lines)
        image = client.images.get(tag)
        images.append(image)
        junit = records_folder / "junit.xml"
        junit.parent.mkdir(exist_ok=True)
        junit.write_text(JUNIT, encoding="utf-8")
        tally = records.Tally()
        tally.add(junit, 0)
        for suite in records.required(changed):
            passed = records.Record(
                cell=cell.id,
                image=str(image.id),
                inputs=inputs,
                suite=suite,
                tests=suite_digest(suite),
                revision="abc",
                when=records.now(),
                seconds=1.0,
                outcome="passed",
                passed=tally.passed,
                evidence=tuple(tally.evidence),
            )
            records.write(passed, tally.evidence, (records_folder,))
        return Item(changed, image)

    yield _make
    for image in images:
        remove(client, str(image.id))
