"""Types of numeric options for argparse, whose errors state the expected range."""

import argparse
import math

from rlhf_stack.cluster.ports import LAST_PORT


def positive_int(text: str) -> int:
    """An integer of at least 1."""
    return _whole(text, 1, math.inf, "a whole number of at least 1")


def non_negative_int(text: str) -> int:
    """An integer of at least 0."""
    return _whole(text, 0, math.inf, "a whole number of at least 0")


def port(text: str) -> int:
    """A TCP port number."""
    return _whole(text, 1, LAST_PORT, f"a port from 1 to {LAST_PORT}")


def positive_float(text: str) -> float:
    """A finite number greater than 0."""
    number = _finite(text)
    if not number > 0:
        raise _unexpected(text, "a number greater than 0")
    return number


def non_negative_float(text: str) -> float:
    """A finite number of at least 0."""
    number = _finite(text)
    if not number >= 0:
        raise _unexpected(text, "a number of at least 0")
    return number


def _whole(text: str, least: int, most: float, expected: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise _unexpected(text, expected) from None
    if not least <= number <= most:
        raise _unexpected(text, expected)
    return number


def _finite(text: str) -> float:
    """The number in ``text``, or NaN if it is not a finite number."""
    try:
        number = float(text)
    except ValueError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _unexpected(text: str, expected: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{text!r}: expected {expected}")
