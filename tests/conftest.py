"""Fixtures of the host's tests: Docker's client, the cell under test and its image.

Tests inside an image load this file too, without Docker: imports are local to their use.
"""

import importlib.util
import json
import os
from collections.abc import Callable
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


def link_packages(replaced: Path, target: Path) -> None:
    """Fill ``target`` with links to the installed packages, with the files of ``replaced`` instead.

    A replaced file has no bytecode, which may be valid whatever the source is.
    """
    for package in replaced.iterdir():
        spec = importlib.util.find_spec(package.name)
        assert spec
        assert spec.submodule_search_locations
        installed = Path(spec.submodule_search_locations[0]).parent
        for folder, _, files in os.walk(package):
            relative = Path(folder).relative_to(replaced)
            (target / relative).mkdir(parents=True, exist_ok=True)
            for name in files:
                (target / relative / name).write_bytes(Path(folder, name).read_bytes())
            stems = {name.partition(".")[0] for name in files}
            for path in (installed / relative).iterdir():
                if path.name == "__pycache__":
                    (target / relative / path.name).mkdir()
                    for compiled in path.iterdir():
                        if compiled.name.partition(".")[0] not in stems:
                            (target / relative / path.name / compiled.name).symlink_to(compiled)
                elif not (replaced / relative / path.name).exists():
                    (target / relative / path.name).symlink_to(path)


@pytest.fixture
def linked() -> Callable[[Path, Path], None]:
    """`link_packages`, for tests in the image."""
    return link_packages


@pytest.fixture(scope="session")
def proofs() -> Path:
    """The folder that `scripts.patches.leave_out` wrote, inside an image."""
    return Path(os.environ["RLHF_STACK_PROOFS"])


@pytest.fixture(scope="session")
def marked(proofs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The patched packages, which note the changed statements that run in a file (`scripts.patches.changes`).

    They are for a process with this folder in ``PYTHONPATH``, and the file in ``RLHF_STACK_EXECUTED``.
    """
    folder = tmp_path_factory.mktemp("marked")
    link_packages(proofs / "marked", folder)
    return folder


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
