"""These tests assume that they run inside the image, on its own Python, whoever the user is."""

import json
import os
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

import pytest

STACK = Path("/etc/rlhf-stack")


@pytest.fixture(scope="session")
def cell() -> dict[str, Any]:
    """The cell as the matrix resolved it."""
    resolved: dict[str, Any] = json.loads((STACK / "cell.json").read_text())
    return resolved


@pytest.fixture(scope="session")
def installed() -> dict[str, Distribution]:
    """What is installed, by normalised name."""
    found = {}
    for distribution in distributions(path=[p for p in os.sys.path if "site-packages" in p]):  # type: ignore[attr-defined]
        found[distribution.name.lower().replace("_", "-").replace(".", "-")] = distribution
    return found
