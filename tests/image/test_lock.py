"""The lock and the image match, both ways; an image built FROM ours does not change locked packages."""

import json
import os
import re
import subprocess
from importlib.metadata import Distribution
from pathlib import Path

import pytest

PIN = re.compile(r"^([a-z0-9][a-z0-9._-]*)==([^\s\\;]+)", re.MULTILINE)
CELL = Path("/etc/rlhf-stack/cell.json")
DERIVED = os.environ.get("RLHF_STACK_DERIVED") == "1"  # set by python -m scripts test image --derived


def locked() -> dict[str, str]:
    """Return versions by name in the lock that the image was built from."""
    return dict(PIN.findall(Path("/etc/rlhf-stack/lock.txt").read_text()))


def own() -> set[str]:
    """Return the packages of this project: its runtime, and those that its recipes build."""
    builds = json.loads(CELL.read_text())["build_from_source"]
    return {"rlhf-stack"} | {build["recipe"] for build in builds if build["recipe"]}


def released(version: str) -> str:
    """Return a version without the local part of a patched package."""
    return re.sub(r"\+stack\.\d+$", "", version)


def test_everything_locked_is_installed_in_that_version(installed: dict[str, Distribution]) -> None:
    """No locked package is missing or has another version."""
    found = {name: released(distribution.version) for name, distribution in installed.items()}
    assert {name: found.get(name) for name in locked()} == locked()


@pytest.mark.skipif(DERIVED, reason="this image is built FROM ours and adds packages")
def test_the_debian_packages_are_those_of_their_lock() -> None:
    """None is missing, none was added, and each has the locked version."""
    query = ["dpkg-query", "--show", "--showformat", "${Package}=${Version}\n"]
    found = subprocess.run(query, check=True, capture_output=True, text=True).stdout.split()
    lock = Path("/etc/rlhf-stack/debian.txt").read_text()
    assert sorted(found) == sorted(re.findall(r"^runtime (\S+) sha256:[0-9a-f]{64} ", lock, re.MULTILINE))


def added(installed: dict[str, Distribution]) -> set[str]:
    """Return the packages that are neither in the lock nor our own."""
    return set(installed) - set(locked()) - own()


@pytest.mark.skipif(DERIVED, reason="this image is built FROM ours and adds packages")
def test_everything_installed_is_locked(installed: dict[str, Distribution]) -> None:
    """Only our own packages are installed without being in the lock."""
    assert added(installed) == set()


@pytest.mark.skipif(not DERIVED, reason="this image is ours: no package is added to it")
def test_added_packages_replace_no_file_of_the_stack(installed: dict[str, Distribution]) -> None:
    """If two packages contain the same file, pip silently installs the later one."""
    owners = {
        str(file.locate()): name for name in {*locked(), *own()} for file in installed[name].files or []
    }
    replaced = [
        f"{name} replaces {file} of {owners[str(file.locate())]}"
        for name in sorted(added(installed))
        for file in installed[name].files or []
        if str(file.locate()) in owners
    ]
    assert added(installed)
    assert replaced == []


def test_constraints_name_what_is_installed(installed: dict[str, Distribution]) -> None:
    """The constraints hold pip in a derived image to the installed versions, patched ones included."""
    constraints = dict(PIN.findall(Path("/etc/rlhf-stack/constraints.txt").read_text()))
    stack = {name: found.version for name, found in installed.items() if name not in added(installed)}
    recipes = own() - set(constraints)  # no index has them, so pip cannot change them
    assert constraints == {name: version for name, version in stack.items() if name not in recipes}
