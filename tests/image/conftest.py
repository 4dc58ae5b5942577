"""These tests assume that they run inside the image, on its own Python, whoever the user is."""

import json
import sysconfig
from importlib.metadata import Distribution, distributions, files
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import canonicalize_name

STACK = Path("/etc/rlhf-stack")


@pytest.fixture(scope="session")
def cell() -> dict[str, Any]:
    """The cell as the matrix resolved it."""
    resolved: dict[str, Any] = json.loads((STACK / "cell.json").read_text())
    return resolved


@pytest.fixture(scope="session")
def installed() -> dict[str, Distribution]:
    """What is installed, by normalised name; not what setuptools, imported, adds to ``sys.path``."""
    found = distributions(path=[sysconfig.get_paths()["purelib"]])
    return {canonicalize_name(distribution.name): distribution for distribution in found}


@pytest.fixture(scope="session")
def headlines(cell: dict[str, Any], installed: dict[str, Distribution]) -> dict[str, Distribution]:
    """The headline packages of the cell, by the name that their project has."""
    return {
        package["name"]: installed[canonicalize_name(package["distribution"])] for package in cell["packages"]
    }


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with the argument ``headline`` or ``entry_point`` runs for each that this image has."""
    if "headline" in metafunc.fixturenames:
        resolved = json.loads((STACK / "cell.json").read_text())
        metafunc.parametrize("headline", [package["name"] for package in resolved["packages"]])
    if "entry_point" in metafunc.fixturenames:
        commands = [file for file in files("openrlhf") or [] if file.parent.as_posix() == "openrlhf/cli"]
        names = [file.stem for file in commands if file.suffix == ".py" and file.stem != "__init__"]
        metafunc.parametrize("entry_point", sorted(names))
