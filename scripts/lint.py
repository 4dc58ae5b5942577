"""All that can be checked without running anything: ``python -m scripts.lint``.

Every check runs, also after one has failed, and the closing line names those that failed.
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from scripts.errors import run
from scripts.paths import ROOT

SHELLS = (b"#!/bin/sh", b"#!/bin/bash", b"#!/usr/bin/env bash")


def shell_scripts(files: Iterable[Path]) -> list[Path]:
    """Those of ``files`` whose first line names a shell."""
    return sorted(file for file in files if file.is_file() and _first_line(file).startswith(SHELLS))


def dockerfiles(files: Iterable[Path]) -> list[Path]:
    """Those of ``files`` that docker builds."""
    return sorted(file for file in files if file.name == "Dockerfile")


def tracked() -> list[Path]:
    """The files of the repository, those not yet added among them."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in done.stdout.split("\0") if name]


def checks() -> dict[str, list[str]]:
    """The command of each check, by name."""
    python = [sys.executable, "-m"]
    return {
        "ruff check": [_tool("ruff"), "check", "--quiet"],
        "ruff format": [_tool("ruff"), "format", "--quiet", "--check"],
        "mypy": [_tool("mypy"), "--no-error-summary"],
        "shellcheck": [_tool("shellcheck"), "--severity=warning", *map(str, shell_scripts(tracked()))],
        "hadolint": [_tool("hadolint"), "--failure-threshold=warning", *map(str, dockerfiles(tracked()))],
        "catalogue": [*python, "scripts.release.catalogue", "--check", "--offline"],
        "schema": [*python, "scripts.matrix.load", "schema", "--check"],
        "patches": [*python, "scripts.patches.patch_series"],
        "hunks": [*python, "scripts.patches.check"],
        "locks": [*python, "scripts.locks.lockfile", "--check", "--offline"],
    }


def _tool(name: str) -> str:
    """A tool of the environment that runs this, whatever PATH says."""
    return str(Path(sys.executable).with_name(name))


def _first_line(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.readline()


def main() -> int:
    """Run the checks; 1 if one failed."""
    failed = []
    for name, command in checks().items():
        print(f"{name} ...", flush=True)
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    run(main)
