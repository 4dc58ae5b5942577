"""Records of each weight sync: an event, a log line, Ray metrics, and a warning for each slow engine.

The metrics are ``rlhf_stack_sync_seconds``, ``rlhf_stack_sync_bytes``, ``rlhf_stack_sync_sent_bytes`` and
``rlhf_stack_sync_gigabytes_per_second`` of the last sync and ``rlhf_stack_mixed_answers`` since the previous
one with the tag ``backend``; and with the tag
``engine``, ``rlhf_stack_engine_tokens_per_second`` since the previous sync, ``rlhf_stack_engine_restarts``,
and ``rlhf_stack_engine_restart_seconds`` from the last loss. ``rlhf_stack_recovery_seconds`` and
``rlhf_stack_weight_version`` are of the run.
Ray exports each with the prefix ``ray_``.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

from rlhf_stack.cluster import actor_registry
from rlhf_stack.config import env_vars
from rlhf_stack.inputs.text import first_names
from rlhf_stack.lazy import ray, torch
from rlhf_stack.sync.buckets import total_bytes
from rlhf_stack.sync.probabilities import verify_probabilities
from rlhf_stack.sync.regrouping import ending_together
from rlhf_stack.sync.trainer import (
    own_group,
    own_share,
    section,
    shares_gpus,
    uses_ray_collectives,
    weight_version,
)
from rlhf_stack.sync.verify import synced_parameters, verify_sync
from rlhf_stack.telemetry import events, run_log, throughput

GIGA = 1e9
SYNC_METRICS = {
    "rlhf_stack_sync_seconds": ("Seconds of the last weight sync.", "backend"),
    "rlhf_stack_sync_bytes": ("Bytes of the trainer's weights in the last sync.", "backend"),
    "rlhf_stack_sync_sent_bytes": ("Bytes sent for them: fewer if only changed elements are.", "backend"),
    "rlhf_stack_sync_gigabytes_per_second": ("Bytes by seconds of the last weight sync, in GB/s.", "backend"),
    "rlhf_stack_mixed_answers": ("Answers with weights of two versions since the sync before.", "backend"),
    "rlhf_stack_engine_tokens_per_second": ("Tokens/s of an engine since the sync before.", "engine"),
}
RESTART_METRICS = {
    "rlhf_stack_engine_restarts": ("How often an engine was restarted.", "engine"),
    "rlhf_stack_engine_restart_seconds": ("Seconds from an engine's last loss to its weights.", "engine"),
}
RUN_METRICS = {
    "rlhf_stack_recovery_seconds": ("Seconds in which the run has waited for lost engines.", "run"),
    "rlhf_stack_weight_version": ("Version of the weights that all engines have.", "run"),
}
METRICS = {**SYNC_METRICS, **RESTART_METRICS, **RUN_METRICS}

Answers = Mapping[int, Mapping[str, Any]]  # the engines' results of a sync, by engine

_indices = itertools.count()


@contextmanager
def recorded_sync(trainer: Any) -> Iterator[None]:
    """Around ``ActorPPOTrainer.broadcast_to_vllm`` on every trainer rank: record and verify the sync.

    Rank 0 records bytes, seconds and backend. With RLHF_STACK_VERIFY_SYNC=1 every parameter is then compared
    with every engine; `SyncMismatch` on rank 0 names parameter, engine, rank and node.
    """
    index = next(_indices)
    is_root = torch.distributed.get_rank() == 0
    if is_root:
        events.begin("sync")
    start = time.monotonic()
    what = f"weight sync {index} over {_backend(trainer)}" if is_root else f"weight sync {index}"
    with actor_registry.translate_actor_errors(what), ending_together(is_root) as outcome:
        yield
    if outcome.failed:
        return  # rank 0 reports it
    seconds = time.monotonic() - start
    specs = [each.spec(trainer) for each in synced_parameters(trainer)]  # on every rank, see `full_shape`
    if is_root:
        backend, size = _backend(trainer), total_bytes(specs)
        group = own_group(trainer)
        encodings = getattr(group, "encodings", None)
        sent = encodings.sent if encodings else size
        rates = report_sync(index, backend, size, seconds, getattr(group, "answers", {}), sent)
        unsent = unsent_parameters(getattr(group, "answers", {}))
        version = weight_version(trainer)
        set_metric("rlhf_stack_weight_version", version, "run")
        events.emit(
            "sync",
            index=index,
            version=version,
            backend=backend,
            bytes=size,
            sent=sent,
            seconds=seconds,
            parameters=len(specs),
            unsent=unsent,
            sources=own_share(trainer).count,
            **rates,
        )
    verification = env_vars.sync_verification()
    if verification != "0":
        verify_sync(trainer, index, is_root)
    if verification == env_vars.PROBABILITIES:
        verify_probabilities(trainer, index, is_root)


def with_recorded_sync(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """Decorate a method of ``ActorPPOTrainer`` that syncs with `recorded_sync`."""

    @wraps(method)
    def recorded(trainer: Any) -> None:
        with recorded_sync(trainer):
            method(trainer)

    return recorded


def report_sync(
    index: int, backend: str, size: int, seconds: float, answers: Answers, sent: int
) -> dict[str, Any]:
    """Log sync ``index`` of ``size`` bytes, set its metrics, and return further fields of its event.

    ``sent`` are its bytes on a link.
    """
    rate = size / seconds / GIGA
    peer = slowest_worker(answers)
    run_log.info(
        f"weight sync {index} over {backend}: {size / 1e6:.1f} MB in {seconds:.2f} s, {rate:.2f} GB/s"
        + (f"; sent as {sent / 1e6:.1f} MB of changes" if sent < size else "")
        + (f"; slowest {peer['who']}, which loaded for {peer['loading']:.2f} s" if peer else "")
    )
    set_metric("rlhf_stack_sync_seconds", seconds, backend)
    set_metric("rlhf_stack_sync_bytes", size, backend)
    set_metric("rlhf_stack_sync_sent_bytes", sent, backend)
    set_metric("rlhf_stack_sync_gigabytes_per_second", rate, backend)
    mixed = sum(int(answer.get("mixed", 0)) for answer in answers.values())
    set_metric("rlhf_stack_mixed_answers", mixed, backend)
    _compare_engines(answers)
    return {"gigabytes_per_second": rate, "slowest": peer, "mixed_answers": mixed}


def slowest_worker(answers: Answers) -> Mapping[str, Any] | None:
    """Return the engine worker with the longest sync by its own clock; None without answers."""
    ranks = [rank for answer in answers.values() for rank in answer["ranks"]]
    return max(ranks, key=lambda rank: float(rank["seconds"]), default=None)


def unsent_parameters(answers: Answers) -> list[str]:
    """Return, and log once, the parameters of engines for which the trainer sends nothing.

    A worker reports them in its first sync, and when they change.
    """
    ranks = [rank for answer in answers.values() for rank in answer["ranks"]]
    names = sorted({name for rank in ranks for name in rank.get("unsent", ())})
    if names:
        _log_unsent(tuple(names))
    return names


@cache
def _log_unsent(names: tuple[str, ...]) -> None:
    run_log.info(
        f"weight sync: the trainer sends nothing for {len(names)} parameters of the engines, which keep "
        f"their values: {first_names(names)}"
    )


def set_metric(name: str, value: float, tag: str) -> None:
    """Set one of `METRICS` if this process is connected to Ray, which exports it."""
    if ray.is_initialized():
        gauge = _gauge(name)
        gauge.set(value, tags={METRICS[name][1]: tag})


@cache
def _gauge(name: str) -> Any:
    from ray.util.metrics import Gauge

    text, tag = METRICS[name]
    return Gauge(name, description=text, tag_keys=(tag,))


def _compare_engines(answers: Answers) -> None:
    """Set each engine's metric, and warn of engines that are much slower than the others."""
    works: dict[int, throughput.Work] = {index: answer["work"] for index, answer in answers.items()}
    for index, work in works.items():
        set_metric("rlhf_stack_engine_tokens_per_second", work.rate, str(index))
    for index in throughput.slow_engines(works):
        workers = ", ".join(rank["who"] for rank in answers[index]["ranks"])
        rates = ", ".join(f"{work.rate:.0f}" for work in works.values())
        run_log.warning(
            f"engine {index} generates {works[index].rate:.0f} tokens/s, less than half of the median "
            f"(all engines: {rates}); its workers are {workers}: does it straddle nodes, or share a GPU?"
        )


def _backend(trainer: Any) -> str:
    arguments = trainer.strategy.args
    if uses_ray_collectives(arguments):
        return f"ray:{section(arguments, 'vllm').sync_backend}"
    if shares_gpus(arguments):
        return "ipc"
    return str(own_group(trainer).name)
