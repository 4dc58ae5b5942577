"""What host-side tests share: the engine and the cell under test.

Tests that run inside an image load this file too, where there is no Docker: it imports where it uses.
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
ANSWER_SECONDS = 600  # of the engine, which may have to export an image of 9 GB, or to prune, beside


def pytest_configure(config: pytest.Config) -> None:
    """Say what the marks mean."""
    config.addinivalue_line("markers", "carries(*pins): for cells with one of these packages, name==version")
    config.addinivalue_line(
        "markers", "integration: minutes each; run before a release, as a suite of its own"
    )


@pytest.fixture(autouse=True)
def carried(request: pytest.FixtureRequest) -> None:
    """Skip, inside an image, a test that is a statement about a release which is not in it."""
    mark = request.node.get_closest_marker("carries")
    if mark is None:
        return
    packages = json.loads(IN_IMAGE.read_text(encoding="utf-8"))["packages"]
    pins = {f"{package['distribution']}=={package['version']}" for package in packages}
    if not pins & set(mark.args):
        pytest.skip(f"for {' or '.join(mark.args)}, which this cell does not carry")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--cell ID``; the default cell if it is not given."""
    parser.addoption("--cell", default=None, help="a cell id")


@pytest.fixture(scope="session")
def client() -> "docker.DockerClient":
    """The engine."""
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
