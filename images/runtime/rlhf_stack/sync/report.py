"""Records of each weight sync: an event, a log line, metrics, and a warning for each slow engine."""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

from rlhf_stack.cluster import actor_registry, run_metrics
from rlhf_stack.config import env_vars
from rlhf_stack.inputs.text import first_names
from rlhf_stack.lazy import torch
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
        run_metrics.publish({("rlhf_stack_weight_version", "run"): version})
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
    """Log sync ``index`` of ``size`` bytes, publish its metrics, and return further fields of its event.

    ``sent`` are its bytes on a link.
    """
    rate = size / seconds / GIGA
    peer = slowest_worker(answers)
    run_log.info(
        f"weight sync {index} over {backend}: {size / 1e6:.1f} MB in {seconds:.2f} s, {rate:.2f} GB/s"
        + (f"; sent as {sent / 1e6:.1f} MB of changes" if sent < size else "")
        + (f"; slowest {peer['who']}, which loaded for {peer['loading']:.2f} s" if peer else "")
    )
    mixed = sum(int(answer.get("mixed", 0)) for answer in answers.values())
    works: dict[int, throughput.Work] = {engine: answer["work"] for engine, answer in answers.items()}
    run_metrics.publish(
        {
            ("rlhf_stack_sync_seconds", backend): seconds,
            ("rlhf_stack_sync_bytes", backend): size,
            ("rlhf_stack_sync_sent_bytes", backend): sent,
            ("rlhf_stack_sync_gigabytes_per_second", backend): rate,
            ("rlhf_stack_mixed_answers", backend): mixed,
        }
        | {("rlhf_stack_engine_tokens_per_second", str(engine)): work.rate for engine, work in works.items()}
    )
    _warn_of_slow_engines(works, answers)
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


def _warn_of_slow_engines(works: Mapping[int, throughput.Work], answers: Answers) -> None:
    """Warn of engines that are much slower than the others."""
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
