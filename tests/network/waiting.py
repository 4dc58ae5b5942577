"""A wait with a deadline, for tests on several containers."""

import time
from collections.abc import Callable

WAIT_SECONDS = 300  # on a busy machine
TEST_SECONDS = 600  # on a busy machine, for what takes up to a minute on a quiet one


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait until ``holds``; AssertionError with ``what`` after `WAIT_SECONDS`."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"waited {WAIT_SECONDS} s for {what}"
        time.sleep(0.1)
