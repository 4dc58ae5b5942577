"""Numbers on a command line, for argparse: each says what was expected in place of what was given."""

import argparse
import math

LAST_PORT = 65535


def count(text: str) -> int:
    """A whole number of at least 1."""
    return _whole(text, 1, math.inf, "a whole number of at least 1")


def whole(text: str) -> int:
    """A whole number of at least 0."""
    return _whole(text, 0, math.inf, "a whole number of at least 0")


def port(text: str) -> int:
    """A port that can be listened on."""
    return _whole(text, 1, LAST_PORT, f"a port from 1 to {LAST_PORT}")


def positive(text: str) -> float:
    """A number greater than 0, and not infinite."""
    number = _finite(text)
    if not number > 0:
        raise _unexpected(text, "a number greater than 0")
    return number


def amount(text: str) -> float:
    """A number of at least 0, and not infinite."""
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
    """The number, or one that is less than, equal to and greater than none."""
    try:
        number = float(text)
    except ValueError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _unexpected(text: str, expected: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{text!r}: expected {expected}")
