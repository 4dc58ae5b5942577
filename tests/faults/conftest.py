"""Nodes whose runs save checkpoints on a shared disk, as on a real cluster."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
from docker.models.images import Image
from docker.models.volumes import Volume

from scripts.git import revision
from scripts.matrix.load import Cell
from scripts.testing import records
from scripts.testing.cluster import LABEL, Cluster, ContainerNode, owner_label
from scripts.testing.suite_digest import suite_digest
from tests.faults.runs import CHECKPOINTS, run_of
from tests.faults.trial import ENVIRONMENT, EVENTS
from tests.network import links, remote

HEAD, DESK = ContainerNode("head", gpus=0), ContainerNode("desk", gpus=0, cpus=0)
GPU_NODES = tuple(ContainerNode(name, gpus=1) for name in ("one", "two", "three", "four"))
DISK = {"type": "tmpfs", "device": "tmpfs", "o": "size=48m,mode=1777"}


@pytest.fixture(scope="session")
def tested(cell: Cell, image: Image) -> dict[str, Any]:
    """What is tested and by which tests, as fields of a case; an edit during the tests does not count."""
    subject = records.subject(cell, image)
    return {
        "cell": subject.cell,
        "image": subject.image,
        "inputs": subject.inputs,
        "tests": suite_digest("faults"),
        "revision": revision(),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder on the host with the events of all nodes."""
    events = tmp_path / "events"
    events.mkdir()
    events.chmod(0o777)  # the containers' user has another uid
    return events


@pytest.fixture
def disk(client: docker.DockerClient) -> Iterator[Volume]:
    """Create a small disk for checkpoints."""
    volume = client.volumes.create(driver_opts=DISK, labels={LABEL: owner_label()})
    yield volume
    volume.remove()


@pytest.fixture
def cluster(client: docker.DockerClient, cell: Cell, disk: Volume, folder: Path) -> Iterator[Cluster]:
    """Start the head, nodes with a GPU each, and a node that only submits runs."""
    if cell.accelerator.kind != "cpu":
        pytest.skip("these runs need a CPU cell")
    nodes = (HEAD, *GPU_NODES[: run_of(cell).gpus], DESK)
    if reason := links.obstacle():
        pytest.skip(reason)
    mounts = {
        str(disk.name): {"bind": CHECKPOINTS, "mode": "rw"},
        str(folder): {"bind": EVENTS, "mode": "rw"},
    }
    options = {"volumes": mounts}
    with Cluster(client, cell.tag, nodes, ENVIRONMENT, options=options, start=remote.reachable) as running:
        yield running
