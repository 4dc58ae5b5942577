"""Types of numeric options for argparse, whose errors state the expected range; options without an effect."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from rlhf_stack.cluster.ports import LAST_PORT
from rlhf_stack.errors import UserError
from rlhf_stack.inputs import numbers
from rlhf_stack.inputs.text import shortened

_Value = TypeVar("_Value")
MEGABYTE = 10**6


def positive_int(text: str) -> int:
    """An integer of at least 1, and at most the number of GPUs of the largest cluster."""
    return _checked(numbers.whole, text, 1, numbers.GPUS)


def non_negative_int(text: str) -> int:
    """An integer of at least 0, and at most the number of GPUs of the largest cluster."""
    return _checked(numbers.whole, text, 0, numbers.GPUS)


def gpu_count(text: str) -> int:
    """A number of GPUs of one machine."""
    return _checked(numbers.whole, text, 1, numbers.GPUS_PER_NODE)


def machine_gpus(text: str) -> int:
    """A number of GPUs of one machine, which may have none."""
    return _checked(numbers.whole, text, 0, numbers.GPUS_PER_NODE)


def machine_cpus(text: str) -> float:
    """A number of CPUs of one machine; 0 is unknown."""
    return _checked(numbers.decimal, text, 0, numbers.CPUS_PER_NODE)


def node_count(text: str) -> int:
    """A number of machines."""
    return _checked(numbers.whole, text, 1, numbers.NODES)


def port(text: str) -> int:
    """A TCP port number."""
    try:
        return numbers.whole(text, 1, LAST_PORT)
    except UserError:
        raise argparse.ArgumentTypeError(
            f"{shortened(text, 60)!r}: expected a port from 1 to {LAST_PORT}"
        ) from None


def seconds(text: str) -> float:
    """A time in seconds, greater than 0 and at most a year."""
    return _checked(numbers.decimal, text, 0, numbers.SECONDS, True)


def positive_float(text: str) -> float:
    """A finite number greater than 0."""
    return _checked(numbers.decimal, text, 0, numbers.BYTES, True)


def non_negative_float(text: str) -> float:
    """A finite number of at least 0."""
    return _checked(numbers.decimal, text, 0, numbers.BYTES)


def gibibytes(text: str) -> float:
    """The memory of a GPU in GiB, given as a number of them or with a unit, such as 80GB."""
    return _checked(numbers.size, text, numbers.GIB, *numbers.GPU_MEMORY) / numbers.GIB


def host_gibibytes(text: str) -> float:
    """The memory of a machine in GiB, given in the same ways."""
    return _checked(numbers.size, text, numbers.GIB, *numbers.HOST_MEMORY) / numbers.GIB


def byte_count(text: str) -> int:
    """A size of at least one byte, given as a number of bytes or with a unit, such as 2GiB."""
    found = _checked(numbers.size, text, 1)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a size of at least 1 byte")
    return found


def megabytes(text: str) -> int:
    """A size of at least one byte, given in 10^6 bytes or with a unit; returned in bytes."""
    _checked(numbers.decimal, text.rstrip("KMGTPiBkmgtpb "), 0, numbers.BYTES, True)
    return max(1, _checked(numbers.size, text, MEGABYTE))


def path(text: str) -> Path:
    """A path, which must not be empty."""
    if not text.strip() or "\0" in text:
        raise argparse.ArgumentTypeError(f"{shortened(text, 60)!r}: expected a path")
    return Path(text)


def _checked(parse: Callable[..., _Value], text: str, *limits: object) -> _Value:
    try:
        return parse(text, *limits)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def refuse_without_effect(options: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """`UserError` for the first of the options ``names`` that is given, although it has no effect ``why``."""
    for name in names:
        if getattr(options, name) is not None and getattr(options, name) is not False:
            raise UserError(f"--{name.replace('_', '-')} has no effect {why}: leave it out")
