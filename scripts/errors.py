"""Errors that the user can correct: one line, no traceback."""

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from rlhf_stack.inputs.text import one_line

INTERRUPTED, BROKEN_PIPE = 130, 141
OUTPUT_ERRORS = (errno.ENOSPC, errno.EIO, errno.EBADF)


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
        if signal.getsignal(number) != signal.SIG_IGN:  # as `nohup` sets it
            signal.signal(number, interrupt)
    try:
        if sys.stdout is None:
            raise UserError("standard output is closed")
        code = main()
        sys.stdout.flush()
        sys.exit(code)
    except UserError as problem:
        print(f"error: {one_line(str(problem))}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        sys.exit(_failed(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _failed(error: OSError) -> int:
    """Report an error of a file or of the output, and return the exit code."""
    of_output = error.filename is None and error.errno in OUTPUT_ERRORS
    if isinstance(error, BrokenPipeError) or of_output:
        with contextlib.suppress(OSError, ValueError):  # otherwise the interpreter's own flush fails again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE
    written = error.filename2 or error.filename  # of a copy the second one
    where = written or ("the output could not be written" if of_output else "a system call failed")
    if error.errno == errno.ENOSPC and written:
        where = f"no space left on the disk of {written}"
    print(f"error: {one_line(str(where))}: {error.strerror or error}", file=sys.stderr)
    return 2
