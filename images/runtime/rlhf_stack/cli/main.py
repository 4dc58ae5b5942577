"""rlhf-stack: plan, start, check and repair RLHF runs on a Ray cluster."""

import argparse
import contextlib
import errno
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from rlhf_stack.cli import commands
from rlhf_stack.cli.job_output import discard
from rlhf_stack.cli.json_output import print_json
from rlhf_stack.cluster import auth_token
from rlhf_stack.config import env_vars, image
from rlhf_stack.errors import UserError
from rlhf_stack.inputs.text import one_line, shortened, suggestion
from rlhf_stack.telemetry import run_log

EPILOG = """
`rlhf-stack COMMAND --help` explains a command with examples. Every command accepts --json; an error is then
JSON too (rlhf-stack/error/1: `error`, `code`). Exit codes of every command but submit: 0 no problem, 1 the
command found a problem, 2 wrong usage, 3 a serious problem, 4 an unexplained error (doctor --log), 70 a
defect of rlhf-stack (RLHF_STACK_TRACEBACK=1 shows where), 74 the output could not be written, 130
interrupted, 141 closed pipe. submit ends with the code of the job, or with its own: 120 to 122, 130, and 143
after SIGTERM (see its help).
"""
WRONG_USAGE, DEFECT, NO_OUTPUT, INTERRUPTED, BROKEN_PIPE = 2, 70, 74, 130, 141
OUTPUT_ERRORS = (errno.ENOSPC, errno.EIO, errno.EBADF, errno.EDQUOT)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; an error is one line on stderr, and JSON with --json."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        words = _current_name(words)
        if sys.stdout is None:
            raise UserError("standard output is closed", NO_OUTPUT)
        code = _run(words)
        sys.stdout.flush()
    except UserError as error:
        return _failed(words, str(error), error.code or _usage_code(words))
    except KeyboardInterrupt:
        return _failed(words, "interrupted", INTERRUPTED, prefix="")
    except Exception as error:
        return _unexpected(words, error)
    return code


def _unexpected(words: Sequence[str], error: Exception) -> int:
    """Report an error that no command explains: of the output, of a file, or a defect of this program."""
    if isinstance(error, BrokenPipeError):  # the reader, such as `head`, closed the pipe
        discard("stdout")
        return BROKEN_PIPE
    if isinstance(error, OSError) and error.filename is None and error.errno in OUTPUT_ERRORS:
        discard("stdout")
        return _failed((), f"the output could not be written: {error.strerror}", NO_OUTPUT)
    if os.environ.get(env_vars.TRACEBACK):
        raise error
    if isinstance(error, OSError) and error.filename is not None:
        return _failed(words, f"{error.filename}: {error.strerror}", _usage_code(words))
    what = f"{type(error).__name__}: {error}"
    return _failed(words, f"a defect of rlhf-stack: {what} ({env_vars.TRACEBACK}=1 shows where)", DEFECT)


def _usage_code(words: Sequence[str]) -> int:
    """The exit code of wrong usage, which a command whose other codes are those of a job changes."""
    command = commands.load(words[0]) if words and words[0] in commands.NAMES else None
    return int(getattr(command, "WRONG_USAGE", WRONG_USAGE))


def _run(words: Sequence[str]) -> int:
    """Parse and run the command; `UserError` for wrong usage."""
    if wrong := next((word for word in _own(words) if word.startswith("--") and word.endswith("=--")), None):
        raise UserError(f"{wrong}: expected a value")  # argparse would drop it
    try:
        options = _parser(words).parse_args(words)
    except SystemExit:  # after --help and --version
        sys.stdout.flush()
        raise
    os.environ.update(auth_token.client_environment(os.environ))  # Ray reads it when it is imported
    try:
        return commands.load(options.command).run(options)
    except ModuleNotFoundError as error:
        if (error.name or "rlhf_stack").startswith("rlhf_stack"):
            raise
        raise UserError(f"{error.name} is not installed: run this in an image of the stack") from None


def _own(words: Sequence[str]) -> Sequence[str]:
    """The words before the command line of a run."""
    return words[: words.index("--")] if "--" in words else words


def _failed(words: Sequence[str], message: str, code: int, prefix: str = "error: ") -> int:
    """Report why the command ends, after ``prefix`` in a line of text, and return its exit code."""
    line = one_line(message)
    with contextlib.suppress(OSError):
        if "--json" in _own(words) and sys.stdout is not None:
            print_json("error", 1, error=line, code=code)
            sys.stdout.flush()
    with contextlib.suppress(OSError):
        print(run_log.line_of(line, prefix), file=sys.stderr)
    return code


def _current_name(arguments: Sequence[str]) -> list[str]:
    """``arguments`` with an old name of a command replaced, after a warning on stderr."""
    if arguments and (name := commands.RENAMED.get(arguments[0])):
        text = (
            f"`rlhf-stack {arguments[0]}` is now `rlhf-stack {name}`; the old name will be removed "
            "in the next release"
        )
        print(run_log.line_of(text, "warning: ", logging.WARNING), file=sys.stderr)
        return [name, *arguments[1:]]
    if arguments and not arguments[0].startswith("-") and arguments[0] not in commands.NAMES:
        meant = suggestion(arguments[0], commands.NAMES)
        raise UserError(
            f"no command {shortened(arguments[0], 60)!r}{meant}; the commands are {', '.join(commands.NAMES)}"
        )
    return list(arguments)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are a `UserError`, and which accepts no abbreviations of options."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help or version; the overridden method ignores an output that cannot be written."""
        print(message, end="", file=file)

    def error(self, message: str) -> NoReturn:
        """Raise the error with the place of the help."""
        raise UserError(f"{message} (see {self.prog} --help)")


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the command that ``arguments`` start with, or of all commands if they name none."""
    parser = _Parser(
        prog="rlhf-stack",
        description=(__doc__ or "").split("\n")[0],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=image.description())
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
