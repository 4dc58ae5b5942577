"""Environment variables that users may set, and their values."""

import os
from collections.abc import Callable, Mapping
from typing import TypeVar

from rlhf_stack.errors import UserError
from rlhf_stack.inputs import numbers
from rlhf_stack.inputs.text import shortened

ACCELERATOR = "RLHF_STACK_ACCELERATOR"  # set by the image, not by users
INPUTS = "RLHF_STACK_INPUTS"  # set by the image: the digest of the inputs of its build
PROFILE = "RLHF_STACK_PROFILE"  # read where a container starts, not by a job
EVENTS = "RLHF_STACK_EVENTS"
VERIFY_SYNC = "RLHF_STACK_VERIFY_SYNC"
REPEATABLE = "RLHF_STACK_REPEATABLE"
SYNC_BACKEND = "RLHF_STACK_SYNC_BACKEND"
SYNC_TIMEOUT = "RLHF_STACK_SYNC_TIMEOUT"
SYNC_BUCKET = "RLHF_STACK_SYNC_BUCKET_MB"
SYNC_SPARSE = "RLHF_STACK_SYNC_SPARSE"
SYNC_FULL_EVERY = "RLHF_STACK_SYNC_FULL_EVERY"
SYNC_SHARDED = "RLHF_STACK_SYNC_SHARDED"
SYNC_SOURCES = "RLHF_STACK_SYNC_SOURCES"
ENGINE_TIMEOUT = "RLHF_STACK_ENGINE_TIMEOUT"
ENGINE_RESTARTS = "RLHF_STACK_ENGINE_RESTARTS"
MIN_ENGINES = "RLHF_STACK_MIN_ENGINES"
PLACEMENT_TIMEOUT = "RLHF_STACK_PLACEMENT_TIMEOUT"
LOG_FORMAT = "RLHF_STACK_LOG_FORMAT"
LOG_FORMATS = ("text", "json")
LOG_LEVEL = "RLHF_STACK_LOG_LEVEL"
LOG_LEVELS = ("info", "warning", "error")
CHECK_COTENANCY = "RLHF_STACK_CHECK_COTENANCY"
TRACEBACK = "RLHF_STACK_TRACEBACK"  # set: an error that is a defect of rlhf-stack ends with its traceback
AUTOSCALE = "RLHF_STACK_AUTOSCALE"  # 1: a run for which there is no room waits for an autoscaler
EXCLUDED_NODES = "RLHF_STACK_EXCLUDED_NODES"  # addresses that get no rank and no engine, by commas
ALLOW_STRADDLE = "RLHF_STACK_ALLOW_STRADDLE"  # 1: engines that fit on no node take GPUs of several

PROBABILITIES = "probabilities"  # a value of VERIFY_SYNC
SYNC_BACKENDS = ("nccl", "gloo", "auto")
FLAGS = (REPEATABLE, CHECK_COTENANCY, AUTOSCALE, ALLOW_STRADDLE)
MEGABYTE = 10**6
BUCKET_SIZES = (1 << 10, 64 << 30)

_Value = TypeVar("_Value")


class VariableError(UserError, ValueError):
    """A variable with an invalid value: wrong usage of a command, and a `ValueError` in a run."""


def check(environment: Mapping[str, str] = os.environ) -> None:
    """Raise `VariableError` for the first variable that has an invalid value in ``environment``."""
    for name in FLAGS:
        flag(name, environment)
    for read in READERS:
        read(environment)
    sync_backend(environment=environment)


def flag(name: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Return a flag: unset, empty and 0 are off, 1 is on, anything else is a `VariableError`."""
    return _one_of(name, ("0", "1"), environment) == "1"


def log_format(environment: Mapping[str, str] = os.environ) -> str:
    """Return the format of log lines: "text" (default) or "json"; anything else is a `VariableError`."""
    return _one_of(LOG_FORMAT, LOG_FORMATS, environment)


def log_level(environment: Mapping[str, str] = os.environ) -> str:
    """Return the lowest level that is logged: "info" (default), "warning" or "error"."""
    return _one_of(LOG_LEVEL, LOG_LEVELS, environment)


def sync_verification(environment: Mapping[str, str] = os.environ) -> str:
    """Return how each weight sync is verified: "0" not, "1" by checksums, or also by `PROBABILITIES`."""
    return _one_of(VERIFY_SYNC, ("0", "1", PROBABILITIES), environment)


def sync_backend(default: str = "nccl", environment: Mapping[str, str] = os.environ) -> str:
    """Return the backend of the weight sync where no flag names one; ``default`` is upstream's."""
    return _one_of(SYNC_BACKEND, SYNC_BACKENDS, environment) if environment.get(SYNC_BACKEND) else default


def sync_timeout(environment: Mapping[str, str] = os.environ) -> float:
    """Return the deadline in seconds of a rendezvous or one transfer of a weight sync (300, as in vLLM)."""
    return _seconds(SYNC_TIMEOUT, 300.0, environment)


def sync_grace() -> float:
    """Return the seconds of `sync_timeout` in which ranks diagnose a transfer that failed."""
    return min(5.0, sync_timeout() / 4)


def sync_bucket(environment: Mapping[str, str] = os.environ) -> int:
    """Return the size in bytes of a weight bucket (32 MB); each process allocates two."""

    def size(text: str) -> int:
        return numbers.size(text, MEGABYTE, *BUCKET_SIZES, examples="32, 32MiB or 32MB")

    return _read(SYNC_BUCKET, 32 * MEGABYTE, size, environment)


def sync_sparse(environment: Mapping[str, str] = os.environ) -> str:
    """Return when a sync sends changed elements only: "auto" (default), "on" or "off"."""
    return _one_of(SYNC_SPARSE, ("auto", "on", "off"), environment)


def sync_full_every(environment: Mapping[str, str] = os.environ) -> int:
    """Return after how many syncs all weights are sent again, where changed elements are sent (50)."""
    return _whole(SYNC_FULL_EVERY, 50, 1, 999_999, environment)


def sync_sharded(environment: Mapping[str, str] = os.environ) -> str:
    """Return when workers copy their shards alone: "auto" (the default: on CPUs), "on" or "off"."""
    return _one_of(SYNC_SHARDED, ("auto", "on", "off"), environment)


def sync_sources(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return how many trainer ranks send the weights over gloo; None ("auto"): one on each of their nodes."""
    is_auto = environment.get(SYNC_SOURCES, "auto") in ("", "auto")
    return None if is_auto else _whole(SYNC_SOURCES, 1, 1, 999, environment)


def engine_timeout(environment: Mapping[str, str] = os.environ) -> float:
    """Return the deadline in seconds from an engine's creation to its first answer (1800, as in vLLM)."""
    return _seconds(ENGINE_TIMEOUT, 1800.0, environment)


def engine_restarts(environment: Mapping[str, str] = os.environ) -> int:
    """Return how often each engine may be restarted (0: never)."""
    return _whole(ENGINE_RESTARTS, 0, 0, 999, environment)


def min_engines(environment: Mapping[str, str] = os.environ) -> int:
    """Return the fewest engines with which a run goes on (1)."""
    return _whole(MIN_ENGINES, 1, 1, 999, environment)


def placement_timeout(environment: Mapping[str, str] = os.environ) -> float:
    """Return the deadline in seconds of a reservation (120): for GPUs in use, new nodes, and Ray itself."""
    return _seconds(PLACEMENT_TIMEOUT, 120.0, environment)


def excluded_nodes(environment: Mapping[str, str] = os.environ) -> set[str]:
    """Return the addresses of nodes on which nothing is placed."""
    return {address.strip() for address in environment.get(EXCLUDED_NODES, "").split(",")} - {""}


def accelerator() -> str | None:
    """Return the accelerator of the image ("cpu", "cuda", "rocm"), None outside our images."""
    return os.environ.get(ACCELERATOR) or None


READERS: tuple[Callable[[Mapping[str, str]], object], ...] = (
    *(log_format, log_level, sync_verification, sync_timeout, sync_bucket, sync_sparse, sync_full_every),
    *(sync_sharded, sync_sources, engine_timeout, engine_restarts, min_engines, placement_timeout),
)


def _one_of(name: str, values: tuple[str, ...], environment: Mapping[str, str]) -> str:
    """The value of a variable, of which the first of ``values`` is the default."""

    def known(text: str) -> str:
        if text not in values:
            raise UserError(f"{shortened(text, 60)!r}: expected {' or '.join(values)}")
        return text

    return _read(name, values[0], known, environment)


def _seconds(name: str, default: float, environment: Mapping[str, str]) -> float:
    """A deadline in seconds, greater than 0 and at most a year."""
    return _read(
        name, default, lambda text: numbers.decimal(text, 0, numbers.SECONDS, above=True), environment
    )


def _whole(name: str, default: int, least: int, most: int, environment: Mapping[str, str]) -> int:
    return _read(name, default, lambda text: numbers.whole(text, least, most), environment)


def _read(
    name: str, default: _Value, parse: Callable[[str], _Value], environment: Mapping[str, str]
) -> _Value:
    """What ``parse`` returns for a variable, ``default`` if it is unset or empty."""
    text = environment.get(name, "")
    try:
        return parse(text) if text else default
    except UserError as error:
        raise VariableError(f"{name}={error}") from None
