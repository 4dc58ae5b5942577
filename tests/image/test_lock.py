"""The lock and the image agree, both ways; in an image made FROM ours, what is locked is as we left it."""

import json
import os
import re
from importlib.metadata import Distribution
from pathlib import Path

import pytest

PIN = re.compile(r"^([a-z0-9][a-z0-9._-]*)==([^\s\\;]+)", re.MULTILINE)
CELL = Path("/etc/rlhf-stack/cell.json")
DERIVED = os.environ.get("RLHF_STACK_DERIVED") == "1"  # set by python -m scripts test image --derived


def locked() -> dict[str, str]:
    """Version by name in the lock that the image was built from."""
    return dict(PIN.findall(Path("/etc/rlhf-stack/lock.txt").read_text()))


def own() -> set[str]:
    """The packages that this project makes: its runtime, and what its recipes build."""
    builds = json.loads(CELL.read_text())["build_from_source"]
    return {"rlhf-stack"} | {build["recipe"] for build in builds if build["recipe"]}


def released(version: str) -> str:
    """A version without the local part that says it is patched."""
    return re.sub(r"\+stack\.\d+$", "", version)


def test_everything_locked_is_installed_in_that_version(installed: dict[str, Distribution]) -> None:
    """Nothing of the lock is missing or of another version."""
    found = {name: released(distribution.version) for name, distribution in installed.items()}
    assert {name: found.get(name) for name in locked()} == locked()


def added(installed: dict[str, Distribution]) -> set[str]:
    """The packages that are not in the lock, without our own."""
    return set(installed) - set(locked()) - own()


@pytest.mark.skipif(DERIVED, reason="this image is made FROM ours: what it adds is its own")
def test_everything_installed_is_locked(installed: dict[str, Distribution]) -> None:
    """Nothing came in beside the lock, but our own package."""
    assert added(installed) == set()


@pytest.mark.skipif(not DERIVED, reason="this image is ours: nothing is added to it")
def test_what_is_added_replaces_no_file_of_the_stack(installed: dict[str, Distribution]) -> None:
    """Two packages may bring the same file, and pip lets the later one win without a word."""
    owners = {
        str(file.locate()): name for name in {*locked(), *own()} for file in installed[name].files or []
    }
    replaced = [
        f"{name} has {file}, which is of {owners[str(file.locate())]}"
        for name in sorted(added(installed))
        for file in installed[name].files or []
        if str(file.locate()) in owners
    ]
    assert added(installed)
    assert replaced == []


def test_constraints_name_what_is_installed(installed: dict[str, Distribution]) -> None:
    """A pip of a derived image is held to exactly what is here, patched versions included."""
    constraints = dict(PIN.findall(Path("/etc/rlhf-stack/constraints.txt").read_text()))
    stack = {name: found.version for name, found in installed.items() if name not in added(installed)}
    recipes = own() - set(constraints)  # no index has them: nothing could move them
    assert constraints == {name: version for name, version in stack.items() if name not in recipes}
