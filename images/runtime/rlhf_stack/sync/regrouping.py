"""A sync group that is formed again: with restarted engines, or without lost ones."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rlhf_stack.accelerator import devices
from rlhf_stack.cluster.actor_registry import PeerError
from rlhf_stack.config import env_vars
from rlhf_stack.lazy import ray, torch
from rlhf_stack.sync.errors import SyncError
from rlhf_stack.sync.joining import join_engines, leave_group
from rlhf_stack.sync.trainer import shares_gpus, uses_ray_collectives


def form_group_again(trainer: Any, engines: Mapping[int, Any]) -> None:
    """Let this rank of OpenRLHF's ``ActorPPOTrainer`` leave its group, and rank 0 form one with ``engines``,
    by their indices.

    All engines must be up and have left the former group. Ranks that share their GPUs with engine workers
    join them again at the next sync. `SyncError` if the weights are sent in a way by which a restarted engine
    cannot receive them.
    """
    arguments = trainer.strategy.args
    if uses_ray_collectives(arguments):
        raise SyncError(
            "a restarted engine cannot receive weights by Ray's collectives: submit the run again, from its "
            "last checkpoint"
        )
    is_root = torch.distributed.get_rank() == 0
    if is_root:
        trainer.engine_indices, trainer.vllm_engines = list(engines), list(engines.values())
        arguments.vllm.num_engines = len(engines)
    leave_group(trainer)
    if is_root and not shares_gpus(arguments):
        join_engines(trainer)


@dataclass
class Outcome:
    """How a sync ended on rank 0."""

    failed: bool = False


@contextmanager
def ending_together(is_root: bool) -> Iterator[Outcome]:
    """Around a sync on every rank of the trainer: after an engine's error on rank 0 all ranks end it.

    Upstream ends a sync with a barrier, at which rank 0 joins the others; all have the outcome then, and the
    sync can be repeated. Without restarts of engines it does nothing.
    """
    outcome = Outcome()
    try:
        yield outcome
    except (SyncError, PeerError, ray.exceptions.RayActorError):
        if is_root and env_vars.engine_restarts():
            torch.distributed.barrier()
            _share(Outcome(failed=True))
        raise
    if env_vars.engine_restarts():
        _share(outcome)


def _share(outcome: Outcome) -> None:
    """Replace the ``outcome`` of every rank by that of rank 0."""
    flag = torch.tensor([int(outcome.failed)], device=devices.torch_device())
    torch.distributed.broadcast(flag, src=0)
    outcome.failed = bool(flag.item())
