"""Containers of the cell as nodes; every test must remove its containers, networks and volumes."""

import contextlib
from collections.abc import Callable, Iterator

import docker
import pytest

from scripts.matrix.load import Cell
from scripts.testing.cluster import LABEL, Cluster, owner_label
from scripts.testing.demo import NODES


@pytest.fixture
def start(nothing_left: None, client: docker.DockerClient, cell: Cell) -> Iterator[Callable[..., Cluster]]:
    """Return a function that starts a cluster for the test, with variables of its nodes as arguments."""
    with contextlib.ExitStack() as stack:

        def started(**environment: str) -> Cluster:
            return stack.enter_context(Cluster(client, cell.tag, NODES, environment))

        yield started


def owned(client: docker.DockerClient) -> list[str]:
    """Return ids of this process's containers and networks, and of unused volumes of no other process."""
    containers = client.containers.list(
        all=True, filters={"label": f"{LABEL}={owner_label()}"}, ignore_removed=True
    )
    networks = client.networks.list(filters={"label": f"{LABEL}={owner_label()}"})
    unused = client.volumes.list(filters={"dangling": True})
    own = owner_label()
    volumes = [volume for volume in unused if (volume.attrs["Labels"] or {}).get(LABEL, own) == own]
    return sorted(str(item.id) for item in (*containers, *networks, *volumes))


@pytest.fixture(autouse=True)
def nothing_left(client: docker.DockerClient) -> Iterator[None]:
    """Check that a test has removed everything that it started."""
    before = owned(client)
    yield
    assert owned(client) == before
