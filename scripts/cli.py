"""The host's command, ``python -m scripts``; each package registers its own commands.

A command is a typed function that returns its exit code, or None for 0.
"""

import os
import sys
from typing import Any, NoReturn

import typer

from scripts import lint
from scripts.docker import commands as docker
from scripts.errors import INTERRUPTED, UserError
from scripts.hip import commands as hip
from scripts.images import commands as images
from scripts.locks import commands as locks
from scripts.matrix import commands as matrix
from scripts.patches import commands as patches
from scripts.release import commands as release
from scripts.testing import commands as testing

PROGRAM = "python -m scripts"
PYTEST_VARIABLES = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")  # may select tests, of which a record knows nothing


def _exit(code: int | None, **_: Any) -> NoReturn:
    raise typer.Exit(code or 0)


app = typer.Typer(
    help="Lock, build, test, catalogue and publish the cells of matrix.yaml.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    result_callback=_exit,
)
for package in (matrix, locks, patches, docker, images, testing, release, hip, lint):
    package.register(app)


def main() -> NoReturn:
    """Run the command that ``sys.argv`` names and exit with its code."""
    for name in PYTEST_VARIABLES:
        os.environ.pop(name, None)
    try:
        sys.exit(app(prog_name=PROGRAM, standalone_mode=False))
    except typer.TyperException as error:  # of the command line
        context = getattr(error, "ctx", None)
        where = context.command_path if context else PROGRAM
        raise UserError(f"{error.format_message().rstrip('.')} (see {where} --help)") from None
    except SystemExit as ended:
        if ended.code == INTERRUPTED:  # typer's own handling of Ctrl-C
            raise KeyboardInterrupt from None
        raise
