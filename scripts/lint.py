"""The checks of style, types, layers and generated files: ``python -m scripts lint``.

Every check runs, also after one has failed, and the last line names those that failed.
"""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import typer

from scripts import git
from scripts.paths import ROOT

SHELLS = (b"#!/bin/sh", b"#!/bin/bash", b"#!/usr/bin/env bash")


def register(app: typer.Typer) -> None:
    """Add the command ``lint`` to ``app``."""
    app.command()(lint)


def lint() -> int:
    """Check style, types, layers, shell scripts, Dockerfiles and that no generated file is stale."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "images" / "runtime")}
    failed = []
    for name, command in checks().items():
        print(f"{name} ...", flush=True)
        if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all checks passed")
    return 1 if failed else 0


def shell_scripts(files: Iterable[Path]) -> list[Path]:
    """Those of ``files`` whose first line names a shell."""
    return sorted(file for file in files if file.is_file() and _first_line(file).startswith(SHELLS))


def dockerfiles(files: Iterable[Path]) -> list[Path]:
    """Those of ``files`` that Docker builds."""
    return sorted(file for file in files if file.name.endswith("Dockerfile"))


def checks() -> dict[str, list[str]]:
    """The command of each check, by name."""
    scripts = [sys.executable, "-m", "scripts"]
    return {
        "ruff check": [_tool("ruff"), "check", "--quiet"],
        "ruff format": [_tool("ruff"), "format", "--quiet", "--check"],
        "mypy": [_tool("mypy"), "--no-error-summary"],
        "shellcheck": [_tool("shellcheck"), "--severity=warning", *map(str, shell_scripts(git.files()))],
        "hadolint": [_tool("hadolint"), "--failure-threshold=warning", *map(str, dockerfiles(git.files()))],
        "layers": [_tool("lint-imports"), "--no-logo"],
        "schema": [*scripts, "matrix", "schema", "--check"],
        "certificate": [*scripts, "certificates", "schema", "--check"],
        "host cells": [*scripts, "matrix", "host-cells", "--check"],
        "patches": [*scripts, "patches", "check"],
        "locks": [*scripts, "lock", "--check", "--offline"],
        "docs/amd.md": [*scripts, "hip", "--check"],
        "catalogue": [*scripts, "catalogue", "--check", "--offline"],
    }


def _tool(name: str) -> str:
    """The path of a tool of this Python's environment."""
    return str(Path(sys.executable).with_name(name))


def _first_line(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.readline()
