"""A mistake or a missing thing that the user can mend: one line, no traceback."""

import errno
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

INTERRUPTED = 130


def interrupt(*_: object) -> NoReturn:
    """A signal handler: what Ctrl-C does."""
    raise KeyboardInterrupt


class UserError(Exception):
    """What went wrong and what to do about it, in one line."""


def run(main: Callable[[], int]) -> NoReturn:
    """Exit with what ``main`` returns; show a `UserError` as one line on stderr, exit code 2.

    A termination or hang-up ends it as Ctrl-C does, by an exception, so that contexts end and clean up.
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
