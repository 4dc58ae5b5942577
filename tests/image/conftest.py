"""Fixtures of tests that run inside the image, with its own Python, as any user."""

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
    """Return the resolved cell of this image."""
    resolved: dict[str, Any] = json.loads((STACK / "cell.json").read_text())
    return resolved


@pytest.fixture(scope="session")
def installed() -> dict[str, Distribution]:
    """Return installed distributions by normalised name, without those that setuptools vendors."""
    found = distributions(path=[sysconfig.get_paths()["purelib"]])
    return {canonicalize_name(distribution.name): distribution for distribution in found}


@pytest.fixture(scope="session")
def headlines(cell: dict[str, Any], installed: dict[str, Distribution]) -> dict[str, Distribution]:
    """Return the headline packages of the cell, by project name."""
    return {
        package["name"]: installed[canonicalize_name(package["distribution"])] for package in cell["packages"]
    }


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with the argument ``headline`` or ``entry_point`` for each of them in this image."""
    if "headline" in metafunc.fixturenames:
        resolved = json.loads((STACK / "cell.json").read_text())
        metafunc.parametrize("headline", [package["name"] for package in resolved["packages"]])
    if "entry_point" in metafunc.fixturenames:
        commands = [file for file in files("openrlhf") or [] if file.parent.as_posix() == "openrlhf/cli"]
        names = [file.stem for file in commands if file.suffix == ".py" and file.stem != "__init__"]
        metafunc.parametrize("entry_point", sorted(names))
