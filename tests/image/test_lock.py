"""The lock and the image agree, both ways."""

import re
from importlib.metadata import Distribution
from pathlib import Path

PIN = re.compile(r"^([a-z0-9][a-z0-9._-]*)==([^\s\\;]+)", re.MULTILINE)
OWN = "rlhf-stack"


def locked() -> dict[str, str]:
    """Version by name in the lock that the image was built from."""
    return dict(PIN.findall(Path("/etc/rlhf-stack/lock.txt").read_text()))


def released(version: str) -> str:
    """A version without the local part that says it is patched."""
    return re.sub(r"\+stack\.\d+$", "", version)


def test_everything_locked_is_installed_in_that_version(installed: dict[str, Distribution]) -> None:
    """Nothing of the lock is missing or of another version."""
    found = {name: released(distribution.version) for name, distribution in installed.items()}
    assert {name: found.get(name) for name in locked()} == locked()


def test_everything_installed_is_locked(installed: dict[str, Distribution]) -> None:
    """Nothing came in beside the lock, but our own package."""
    assert set(installed) - set(locked()) == {OWN}


def test_constraints_name_what_is_installed(installed: dict[str, Distribution]) -> None:
    """A pip of a derived image is held to exactly what is here, patched versions included."""
    constraints = dict(PIN.findall(Path("/etc/rlhf-stack/constraints.txt").read_text()))
    assert constraints == {name: distribution.version for name, distribution in installed.items()}
