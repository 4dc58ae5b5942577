"""Environment variables that users may set, and their values."""

import os

ACCELERATOR = "RLHF_STACK_ACCELERATOR"  # set by the image, not by users
INPUTS = "RLHF_STACK_INPUTS"  # set by the image: the digest of the inputs of its build
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


def flag(name: str) -> bool:
    """Return a flag: unset, empty and 0 are off, 1 is on, anything else is a `ValueError`."""
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{name}={value!r}: expected 0 or 1")
    return value == "1"


def log_format() -> str:
    """Return the format of log lines: "text" (default) or "json"; anything else is a `ValueError`."""
    return _one_of(LOG_FORMAT, LOG_FORMATS)


def log_level() -> str:
    """Return the lowest level that is logged: "info" (default), "warning" or "error"."""
    return _one_of(LOG_LEVEL, LOG_LEVELS)


def _one_of(name: str, values: tuple[str, ...]) -> str:
    """Return the value of a variable, of which the first of ``values`` is the default."""
    value = os.environ.get(name) or values[0]
    if value not in values:
        raise ValueError(f"{name}={value!r}: expected {' or '.join(values)}")
    return value


def seconds(name: str, default: float) -> float:
    """Return a deadline in seconds; `ValueError` if it is not a positive number."""
    return _positive(name, default, "seconds")


def _positive(name: str, default: float, unit: str) -> float:
    value = os.environ.get(name, "")
    if not value:
        return default
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ValueError(f"{name}={value!r}: expected a number of {unit} greater than 0")
    return number


def sync_verification() -> str:
    """Return how each weight sync is verified: "0" not, "1" by checksums, or also by `PROBABILITIES`."""
    return _one_of(VERIFY_SYNC, ("0", "1", PROBABILITIES))


def sync_backend(default: str = "nccl") -> str:
    """Return the backend of the weight sync where no flag names one; ``default`` is upstream's."""
    return os.environ.get(SYNC_BACKEND) or default


def sync_timeout() -> float:
    """Return the deadline in seconds of a rendezvous or one transfer of a weight sync (300, as in vLLM)."""
    return seconds(SYNC_TIMEOUT, 300.0)


def sync_grace() -> float:
    """Return the seconds of `sync_timeout` in which ranks diagnose a transfer that failed."""
    return min(5.0, sync_timeout() / 4)


def sync_bucket() -> int:
    """Return the size in bytes of a weight bucket (32 MB); each process allocates two."""
    return int(_positive(SYNC_BUCKET, 32.0, "megabytes") * 1_000_000)


def sync_sparse() -> str:
    """Return when a sync sends changed elements only: "auto" (default), "on" or "off"."""
    return _one_of(SYNC_SPARSE, ("auto", "on", "off"))


def sync_full_every() -> int:
    """Return after how many syncs all weights are sent again, where changed elements are sent (50)."""
    return _whole(SYNC_FULL_EVERY, 50, 1, digits=6)


def sync_sharded() -> str:
    """Return when workers copy their shards alone: "auto" (the default: on CPUs), "on" or "off"."""
    return _one_of(SYNC_SHARDED, ("auto", "on", "off"))


def sync_sources() -> int | None:
    """Return how many trainer ranks send the weights over gloo; None ("auto"): one on each of their nodes."""
    return None if os.environ.get(SYNC_SOURCES, "auto") in ("", "auto") else _whole(SYNC_SOURCES, 1, 1)


def engine_timeout() -> float:
    """Return the deadline in seconds from an engine's creation to its first answer (1800, as in vLLM)."""
    return seconds(ENGINE_TIMEOUT, 1800.0)


def engine_restarts() -> int:
    """Return how often each engine may be restarted (0: never); `ValueError` if it is no whole number."""
    return _whole(ENGINE_RESTARTS, 0, 0)


def min_engines() -> int:
    """Return the fewest engines with which a run goes on (1); `ValueError` if it is no whole number."""
    return _whole(MIN_ENGINES, 1, 1)


def _whole(name: str, default: int, least: int, digits: int = 3) -> int:
    value = os.environ.get(name) or str(default)
    if not (value.isascii() and value.isdecimal() and len(value) <= digits and int(value) >= least):
        raise ValueError(f"{name}={value!r}: expected a whole number from {least} to {'9' * digits}")
    return int(value)


def placement_timeout() -> float:
    """Return the deadline in seconds of a reservation (120): for GPUs in use, new nodes, and Ray itself."""
    return seconds(PLACEMENT_TIMEOUT, 120.0)


def excluded_nodes() -> set[str]:
    """Return the addresses of nodes on which nothing is placed."""
    return {address.strip() for address in os.environ.get(EXCLUDED_NODES, "").split(",")} - {""}


def accelerator() -> str | None:
    """Return the accelerator of the image ("cpu", "cuda", "rocm"), None outside our images."""
    return os.environ.get(ACCELERATOR) or None
