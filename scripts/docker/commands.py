"""``python -m scripts docker``."""

import os
import sys
from typing import Annotated

import typer

from scripts.docker import bootstrap
from scripts.docker.client import connect, docker_command


def register(app: typer.Typer) -> None:
    """Add this package's commands to ``app``."""
    group = typer.Typer(help="Install and start Docker.")
    group.callback()(lambda: None)  # a group, although it has one command
    group.command()(ensure)
    app.add_typer(group, name="docker")


def ensure(
    user: Annotated[
        bool, typer.Option("--user", help="Root sets up Docker for a user, who builds without root.")
    ] = False,
) -> None:
    """Install and start Docker and the build tools where necessary, and wait until Docker answers."""
    bootstrap.ensure(is_root=os.geteuid() == 0 and not user)
    version = connect().version()["Version"]
    print(f"Docker Engine {version}; builds with {docker_command()[0]}", file=sys.stderr)
