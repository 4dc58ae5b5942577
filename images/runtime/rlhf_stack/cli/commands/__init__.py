"""The commands of ``rlhf-stack``: one module each, imported only when it is asked for.

The module's docstring is what ``--help`` shows, its first line alone in the list of commands. The module has
``arguments(parser)``, which declares its options, and ``run(options)``, which returns the exit code: 0, or 1
if what was asked about is not well. A user's mistake is raised as a `rlhf_stack.errors.UserError`. What a
module imports at its top must be light.
"""

import argparse
from importlib import import_module
from typing import Protocol, cast

# In the order of an operator's day.
NAMES = ("plan", "start", "rehearse", "submit", "profile", "top", "doctor", "reap", "patches")


class Command(Protocol):
    """What a module in here has."""

    __doc__: str | None

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options of the command."""

    def run(self, options: argparse.Namespace) -> int:
        """Do it; the exit code."""


def load(name: str) -> Command:
    """The command ``name``, one of `NAMES`."""
    return cast(Command, import_module(f"rlhf_stack.cli.commands.{name}"))
