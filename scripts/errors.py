"""Errors that the user can correct: one line, no traceback."""

import errno
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

INTERRUPTED = 130


def interrupt(*_: object) -> NoReturn:
    """A signal handler that raises `KeyboardInterrupt`, as Ctrl-C does."""
    raise KeyboardInterrupt


class UserError(Exception):
    """An error and its remedy, in one line."""


def run(main: Callable[[], int]) -> NoReturn:
    """Exit with the code that ``main`` returns; print a `UserError` as one line on stderr, exit code 2.

    A termination or hang-up raises `KeyboardInterrupt`, as Ctrl-C does, so that contexts clean up.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        sys.exit(main())
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"error: no space left on the disk of {error.filename or 'this machine'}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
