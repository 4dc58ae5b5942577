"""rlhf-stack: plan, start, check and repair RLHF runs on a Ray cluster."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from rlhf_stack import __version__
from rlhf_stack.cli import commands
from rlhf_stack.cluster import auth_token
from rlhf_stack.errors import UserError

EPILOG = """
`rlhf-stack COMMAND --help` explains a command with examples. Every command accepts --json. Exit codes: 0 no
problem, 1 the command found a problem, 2 wrong usage; the help of a command lists further codes.
"""
WRONG_USAGE, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; a `UserError` is printed as one line on stderr."""
    words = _current_name(sys.argv[1:] if arguments is None else arguments)
    options = _parser(words).parse_args(words)
    os.environ.update(auth_token.client_environment(os.environ))  # Ray reads it when it is imported
    try:
        code = commands.load(options.command).run(options)
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_USAGE
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("rlhf_stack"):
            raise
        print(f"error: {error.name} is not installed: run this in an image of the stack", file=sys.stderr)
        return WRONG_USAGE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return code


def _current_name(arguments: Sequence[str]) -> list[str]:
    """``arguments`` with an old name of a command replaced, after a warning on stderr."""
    if arguments and (name := commands.RENAMED.get(arguments[0])):
        print(
            f"warning: `rlhf-stack {arguments[0]}` is now `rlhf-stack {name}`; the old name will be removed "
            "in the next release",
            file=sys.stderr,
        )
        return [name, *arguments[1:]]
    return list(arguments)


class _Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line, as for a `UserError`."""

    def error(self, message: str) -> NoReturn:
        """Print the error and where to find help, and exit with code 2."""
        self.exit(WRONG_USAGE, f"error: {message} (see {self.prog} --help)\n")


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the command that ``arguments`` start with, or of all commands if they name none."""
    parser = _Parser(
        prog="rlhf-stack",
        description=(__doc__ or "").split("\n")[0],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rlhf-stack {__version__}")
    choices = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in arguments[:1] if arguments and arguments[0] in commands.NAMES else commands.NAMES:
        command = commands.load(name)
        text = (command.__doc__ or "").strip()
        subparser = choices.add_parser(
            name,
            help=text.split("\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_options(subparser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
