"""Around each weight sync: its size and time and, on request, whether trainer and engines are equal then."""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from rlhf_stack import sync
from rlhf_stack.cluster import actor_registry
from rlhf_stack.config import env_vars
from rlhf_stack.sync.buckets import total
from rlhf_stack.sync.checksum import Difference, Piece, differences
from rlhf_stack.sync.report import report
from rlhf_stack.sync.sending import ZERO_3, describe, section
from rlhf_stack.telemetry import events

SHOWN = 5

_indices = itertools.count()


class SyncMismatch(RuntimeError):
    """An engine does not hold the trainer's weights after a sync."""


@contextmanager
def recorded_sync(trainer: Any) -> Iterator[None]:
    """Around ``ActorPPOTrainer.broadcast_to_vllm`` on every trainer rank.

    Rank 0 records bytes, seconds and backend. With RLHF_STACK_VERIFY_SYNC=1 every parameter is compared with
    every engine afterwards; `SyncMismatch` on rank 0 names parameter, engine, rank and node.
    """
    import torch

    index = next(_indices)
    is_root = torch.distributed.get_rank() == 0
    if is_root:
        events.begins("sync")
    start = time.monotonic()
    with actor_registry.named(
        f"weight sync {index} over {_backend(trainer)}" if is_root else f"weight sync {index}"
    ):
        yield
    seconds = time.monotonic() - start
    if is_root:
        described = [describe(name, parameter) for name, parameter in _synced(trainer)]
        backend, size = _backend(trainer), total(described)
        answers = getattr(getattr(trainer, "_model_update_group", None), "answers", [])
        told = report(index, backend, size, seconds, answers)
        events.emit(
            "sync",
            index=index,
            backend=backend,
            bytes=size,
            seconds=seconds,
            parameters=len(described),
            **told,
        )
    if env_vars.flag(env_vars.VERIFY_SYNC):
        _verify(trainer, index, is_root)


def recorded(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """A method of ``ActorPPOTrainer`` that syncs, with `recorded_sync` around it."""

    @wraps(method)
    def synced(trainer: Any) -> None:
        with recorded_sync(trainer):
            method(trainer)

    return synced


def _verify(trainer: Any, index: int, is_root: bool) -> None:
    import deepspeed

    deepspeed_arguments = section(trainer.strategy.args, "ds")
    if getattr(deepspeed_arguments, "tensor_parallel_size", 1) > 1:
        raise NotImplementedError(
            f"{env_vars.VERIFY_SYNC}=1 does not know DeepSpeed's tensor parallelism "
            "(--ds.tensor_parallel_size > 1): leave one of them out"
        )
    start = time.monotonic()
    parameters = _synced(trainer)
    pieces: list[list[dict[str, list[Piece]]]] = []
    if is_root:
        wanted = [(name, list(describe(name, parameter).shape)) for name, parameter in parameters]
        answers = sync.wait(
            [engine.call_workers.remote("weight_pieces", wanted) for engine in trainer.vllm_engines],
            "the engines' checksums",
        )
        pieces = [[_by_name(rank) for rank in ranks] for ranks in answers]
    found: list[Difference] = []
    for name, parameter in parameters:
        with deepspeed.zero.GatheredParameters([parameter], enabled=deepspeed_arguments.zero_stage == ZERO_3):
            if is_root:
                held = [[rank.get(name, []) for rank in ranks] for ranks in pieces]
                found += differences(name, parameter.data, held)
    if is_root:
        names = sorted({difference.name for difference in found})
        events.emit(
            "verify",
            index=index,
            equal=not found,
            parameters=len(parameters),
            mismatched=names,
            seconds=time.monotonic() - start,
        )
        if found:
            raise SyncMismatch(_message(index, len(parameters), names, found, trainer.vllm_engines))


def _message(index: int, total: int, names: list[str], found: list[Difference], engines: list[Any]) -> str:
    nodes = sync.wait([engine.where.remote() for engine in engines], "the engines' nodes")
    lines = [f"after sync {index} {len(names)} of {total} parameters differ between trainer and engines:"]
    for difference in found[:SHOWN]:
        ranks = nodes[difference.engine]
        where = ranks if difference.rank is None else [ranks[difference.rank]]
        addresses = ", ".join(sorted({str(rank["node"]) for rank in where}))
        rank = "all ranks" if difference.rank is None else f"rank {difference.rank}"
        lines.append(
            f"{difference.name}: engine {difference.engine}, {rank} on {addresses}: {difference.what}"
        )
    if len(found) > SHOWN:
        lines.append(f"and {len(found) - SHOWN} more")
    return "\n  ".join(lines)


def _synced(trainer: Any) -> list[tuple[str, Any]]:
    """The parameters that upstream sends: all, or for a vision-language model those that are trained."""
    is_vlm = getattr(trainer.actor, "is_vlm", False)
    return [(n, p) for n, p in trainer.actor.model.module.named_parameters() if p.requires_grad or not is_vlm]


def _backend(trainer: Any) -> str:
    if getattr(trainer, "use_cuda_ipc", False):  # older releases have no such way
        return "ipc"
    group = trainer._model_update_group
    return f"ray:{trainer.strategy.args.vllm.sync_backend}" if isinstance(group, str) else str(group.name)


def _by_name(pieces: list[dict[str, Any]]) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = {}
    for value in pieces:
        piece = Piece.from_dict(value)
        found.setdefault(piece.name, []).append(piece)
    return found
