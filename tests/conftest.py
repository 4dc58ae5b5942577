"""Fixtures of the host's tests: Docker's client, the cell under test and its image.

Tests inside an image load this file too, without Docker: imports are local to their use.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import docker
    from docker.models.images import Image

    from scripts.matrix.load import Cell


IN_IMAGE = Path("/etc/rlhf-stack/cell.json")
ANSWER_SECONDS = 600  # Docker may have to export an image of 9 GB, or to prune, at the same time


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marks."""
    config.addinivalue_line("markers", "carries(*pins): for cells with one of these packages, name==version")
    config.addinivalue_line(
        "markers", "integration: minutes each; run before a release, as a suite of its own"
    )


@pytest.fixture(autouse=True)
def carried(request: pytest.FixtureRequest) -> None:
    """Skip, inside an image, a test about a release that is not in it."""
    mark = request.node.get_closest_marker("carries")
    if mark is None:
        return
    packages = json.loads(IN_IMAGE.read_text(encoding="utf-8"))["packages"]
    pins = {f"{package['distribution']}=={package['version']}" for package in packages}
    if not pins & set(mark.args):
        pytest.skip(f"for {' or '.join(mark.args)}, which this cell does not have")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--cell ID``; the default is the default cell."""
    parser.addoption("--cell", default=None, help="a cell id")


@pytest.fixture(scope="session")
def client() -> "docker.DockerClient":
    """Docker's client."""
    from scripts.docker.client import connect

    return connect(ANSWER_SECONDS)


@pytest.fixture(scope="session")
def cell(request: pytest.FixtureRequest) -> "Cell":
    """The cell under test."""
    from scripts.matrix.load import find, load

    matrix = load()
    return find(matrix, request.config.getoption("--cell") or matrix.default)


@pytest.fixture(scope="session")
def image(client: "docker.DockerClient", cell: "Cell") -> "Image":
    """Its image."""
    return client.images.get(cell.tag)
