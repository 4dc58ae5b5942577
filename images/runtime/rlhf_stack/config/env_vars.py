"""The variables that users may set, each read in one place."""

import os

ACCELERATOR = "RLHF_STACK_ACCELERATOR"  # set by the image, not by users
EVENTS = "RLHF_STACK_EVENTS"
VERIFY_SYNC = "RLHF_STACK_VERIFY_SYNC"
REPEATABLE = "RLHF_STACK_REPEATABLE"
SYNC_BACKEND = "RLHF_STACK_SYNC_BACKEND"
SYNC_TIMEOUT = "RLHF_STACK_SYNC_TIMEOUT"
SYNC_BUCKET = "RLHF_STACK_SYNC_BUCKET_MB"
ENGINE_TIMEOUT = "RLHF_STACK_ENGINE_TIMEOUT"
PLACEMENT_TIMEOUT = "RLHF_STACK_PLACEMENT_TIMEOUT"
CHECK_COTENANCY = "RLHF_STACK_CHECK_COTENANCY"
ALLOW_STRADDLE = "RLHF_STACK_ALLOW_STRADDLE"  # 1: engines for which no node has room take GPUs of several


def flag(name: str) -> bool:
    """Whether variable ``name`` is on: unset, empty and 0 are off, 1 is on, anything else is an error."""
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{name}={value!r}: expected 0 or 1")
    return value == "1"


def seconds(name: str, default: float) -> float:
    """The deadline in variable ``name`` in seconds; ValueError if it is not a positive number."""
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


def sync_backend(default: str) -> str:
    """The group that sends weights to engines where no flag names one; ``default`` is upstream's."""
    return os.environ.get(SYNC_BACKEND) or default


def sync_timeout() -> float:
    """Seconds that a rendezvous or one transfer of a weight sync may take (300, as vLLM's own store)."""
    return seconds(SYNC_TIMEOUT, 300.0)


def sync_grace() -> float:
    """Seconds, of `sync_timeout`, in which ranks whose transfer failed find out whom to blame."""
    return min(5.0, sync_timeout() / 4)


def sync_bucket() -> int:
    """Bytes of the buckets in which weights are sent (32 MB); each process keeps two."""
    return int(_positive(SYNC_BUCKET, 32.0, "megabytes") * 1_000_000)


def engine_timeout() -> float:
    """Seconds that an engine may take from its creation until it answers (1800, as vLLM's own wait)."""
    return seconds(ENGINE_TIMEOUT, 1800.0)


def placement_timeout() -> float:
    """Seconds that Ray may take to reserve what was planned on free GPUs (120; nothing is started then)."""
    return seconds(PLACEMENT_TIMEOUT, 120.0)


def accelerator() -> str | None:
    """What the image was made for ("cpu", "cuda", "rocm"), or None outside our images."""
    return os.environ.get(ACCELERATOR) or None
