"""What host-side tests share: the engine and the cell under test.

Tests that run inside an image load this file too, where there is no Docker: it imports where it uses.
"""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import docker
    from docker.models.images import Image

    from scripts.matrix import Cell


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--cell ID``; the default cell if it is not given."""
    parser.addoption("--cell", default=None, help="a cell id")


@pytest.fixture(scope="session")
def client() -> "docker.DockerClient":
    """The engine."""
    from scripts import engine

    return engine.client()


@pytest.fixture(scope="session")
def cell(request: pytest.FixtureRequest) -> "Cell":
    """The cell under test."""
    from scripts.matrix import find, load

    matrix = load()
    return find(matrix, request.config.getoption("--cell") or matrix.default)


@pytest.fixture(scope="session")
def image(client: "docker.DockerClient", cell: "Cell") -> "Image":
    """Its image."""
    return client.images.get(cell.tag)
