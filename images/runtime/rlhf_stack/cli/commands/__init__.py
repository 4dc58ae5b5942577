"""The commands of ``rlhf-stack``, one module each; a module is imported only when its command runs.

The module's docstring is the text of ``--help``; its first line is also the entry in the list of commands.
``add_options(parser)`` declares the options; ``run(options)`` returns the exit code: 0, or 1 if the command
found a problem. Wrong usage raises `rlhf_stack.errors.UserError`. Imports at the top of a module must be
light, because ``rlhf-stack --help`` imports every module.
"""

import argparse
from importlib import import_module
from typing import Protocol, cast

# In the order in which an operator needs them.
NAMES = (
    *("plan", "start", "check-network", "certify", "submit", "checkpoint"),
    *("tune", "top", "doctor", "reap", "patches"),
)
# Old names, accepted with a warning for one release; the schemas of their JSON output keep them.
RENAMED = {"rehearse": "check-network", "profile": "tune"}


class Command(Protocol):
    """The interface of a command's module."""

    __doc__: str | None

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options of the command."""

    def run(self, options: argparse.Namespace) -> int:
        """Run the command and return its exit code."""


def load(name: str) -> Command:
    """Import the module of the command ``name``, which is in `NAMES` or `RENAMED`."""
    module = RENAMED.get(name, name).replace("-", "_")
    return cast(Command, import_module(f"rlhf_stack.cli.commands.{module}"))
