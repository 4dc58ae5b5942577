"""rlhf-stack: what an operator asks before a cluster starts, while it runs and after it died."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from rlhf_stack import __version__
from rlhf_stack.cli import commands
from rlhf_stack.cluster import auth_token
from rlhf_stack.errors import UserError

CLOSING = """
`rlhf-stack COMMAND --help` explains a command with examples. Every command takes --json. Exit codes: 0 all is
well, 1 what was asked about is not, 2 a mistake in the question; a command's help names those of its own.
"""
MISTAKE, INTERRUPTED, NO_READER = 2, 130, 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a `UserError` is one line on stderr."""
    asked = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser(asked).parse_args(asked)
    os.environ.update(auth_token.use(os.environ))  # Ray reads it when it is imported
    try:
        code = commands.load(options.command).run(options)
        sys.stdout.flush()
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return MISTAKE
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("rlhf_stack"):
            raise
        print(
            f"error: {error.name} is not installed here: run this in an image of the stack", file=sys.stderr
        )
        return MISTAKE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    return code


class _Parser(argparse.ArgumentParser):
    """A mistake is one line, as a `UserError` is."""

    def error(self, message: str) -> NoReturn:
        """Say it, and where help is."""
        self.exit(MISTAKE, f"error: {message} (see {self.prog} --help)\n")


def _parser(asked: Sequence[str]) -> argparse.ArgumentParser:
    """The parser: of the command that is asked for, or of all where there is none to name them."""
    parser = _Parser(
        prog="rlhf-stack",
        description=(__doc__ or "").split("\n")[0],
        epilog=CLOSING,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rlhf-stack {__version__}")
    choices = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    named = asked[:1] if asked and asked[0] in commands.NAMES else commands.NAMES
    for name in named:
        command = commands.load(name)
        text = (command.__doc__ or "").strip()
        own = choices.add_parser(
            name,
            help=text.split("\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.arguments(own)
    return parser


if __name__ == "__main__":
    sys.exit(main())
