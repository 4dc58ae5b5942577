"""What is said of a sync: a line in the log, numbers for Ray's metrics, and which engines are slow.

The metrics are ``rlhf_stack_sync_seconds``, ``rlhf_stack_sync_bytes`` and
``rlhf_stack_sync_gigabytes_per_second`` of the last sync with the tag ``backend``, and
``rlhf_stack_engine_tokens_per_second`` since the sync before with the tag ``engine``. Ray exports each with
``ray_`` before its name.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from rlhf_stack.telemetry import throughput
from rlhf_stack.telemetry.logging import tell, warn

GIGA = 1e9
METRICS = {
    "rlhf_stack_sync_seconds": ("Seconds of the last weight sync.", "backend"),
    "rlhf_stack_sync_bytes": ("Bytes of the trainer's weights in the last sync.", "backend"),
    "rlhf_stack_sync_gigabytes_per_second": ("Bytes by seconds of the last weight sync, in GB/s.", "backend"),
    "rlhf_stack_engine_tokens_per_second": ("Tokens/s of an engine since the sync before.", "engine"),
}

Answers = Sequence[Mapping[str, Any]]


def report(index: int, backend: str, size: int, seconds: float, answers: Answers) -> dict[str, Any]:
    """Say how sync ``index`` went, and return what its event has besides; ``answers`` are the engines'."""
    rate = size / seconds / GIGA
    peer = slowest(answers)
    tell(
        f"weight sync {index} over {backend}: {size / 1e6:.1f} MB in {seconds:.2f} s, {rate:.2f} GB/s"
        + (f"; slowest {peer['who']}, {peer['loading']:.2f} s of it loading" if peer else "")
    )
    measure("rlhf_stack_sync_seconds", seconds, backend)
    measure("rlhf_stack_sync_bytes", size, backend)
    measure("rlhf_stack_sync_gigabytes_per_second", rate, backend)
    _compare([answer["work"] for answer in answers], answers)
    return {"gigabytes_per_second": rate, "slowest": peer}


def slowest(answers: Answers) -> Mapping[str, Any] | None:
    """The engine worker that took longest, as it said itself; None where engines said nothing."""
    ranks = [rank for answer in answers for rank in answer["ranks"]]
    return max(ranks, key=lambda rank: float(rank["seconds"]), default=None)


def measure(name: str, value: float, tag: str) -> None:
    """Set one of `METRICS` where there is a Ray to export it."""
    import ray

    if ray.is_initialized():
        gauge = _gauge(name)
        gauge.set(value, tags={METRICS[name][1]: tag})


@cache
def _gauge(name: str) -> Any:
    from ray.util.metrics import Gauge

    text, tag = METRICS[name]
    return Gauge(name, description=text, tag_keys=(tag,))


def _compare(works: Sequence[throughput.Work], answers: Answers) -> None:
    for index, work in enumerate(works):
        measure("rlhf_stack_engine_tokens_per_second", work.rate, str(index))
    for index in throughput.slow(works):
        where = ", ".join(rank["who"] for rank in answers[index]["ranks"])
        rates = ", ".join(f"{work.rate:.0f}" for work in works)
        warn(
            f"engine {index} generates {works[index].rate:.0f} tokens/s, less than half of the median "
            f"(all engines: {rates}); it has {where}: does it straddle nodes, or share a GPU?"
        )
