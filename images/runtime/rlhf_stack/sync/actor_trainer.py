"""What replaces the methods of OpenRLHF 0.11's ``ActorPPOTrainer`` that send the weights.

Upstream calls each engine for each parameter, and waits without a deadline. Its own method still runs with
--vllm.sync_with_ray, where Ray's collectives transport the weights.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from rlhf_stack.accelerator import devices
from rlhf_stack.cluster.actor_registry import PeerError
from rlhf_stack.sync import sources
from rlhf_stack.sync.actor_waits import wait_for_engine_results, wait_for_engine_start
from rlhf_stack.sync.backend import check_backend, requested_backend
from rlhf_stack.sync.encoding import refuse_gloo_only
from rlhf_stack.sync.engine_parameters import refuse_renamed
from rlhf_stack.sync.errors import SyncError
from rlhf_stack.sync.joining import join_engines, join_workers_of_same_gpus, leave_group
from rlhf_stack.sync.membership import MOST_NAMED
from rlhf_stack.sync.report import recorded_sync
from rlhf_stack.sync.sending import send
from rlhf_stack.sync.trainer import (
    own_group,
    own_share,
    requests_ray_collectives,
    shares_gpus,
    synced_names,
    uses_ray_collectives,
)
from rlhf_stack.telemetry import run_log


def forms_weight_group(method: Callable[[Any, str], None]) -> Callable[[Any, str], None]:
    """Decorate ``_init_vllm_sync_group``, which rank 0 calls: honour the backend, and wait with a deadline.

    Ranks that share their GPUs with engine workers form a group with each other at the first sync.
    """

    @wraps(method)
    def formed(trainer: Any, _: str) -> None:
        arguments = trainer.strategy.args
        if shares_gpus(arguments):
            return
        backend, by_ray = requested_backend(arguments), uses_ray_collectives(arguments)
        check_backend(backend, by_ray)
        if by_ray:
            refuse_renamed(trainer.actor.model.module, synced_names(trainer))
        wait_for_engine_start(trainer.vllm_engines)
        if by_ray:
            method(trainer, backend)
        else:
            join_engines(trainer)

    return formed


def _send(trainer: Any) -> None:
    """Send from rank 0, from several ranks, or from every rank to the engine worker on its GPU.

    If several send, rank 0 raises the `SyncError` of any of them, and the others go on to the end of the
    sync, where all ranks meet.
    """
    import torch.distributed as dist

    join: Callable[[Any], None] | None = None
    is_shared = shares_gpus(trainer.strategy.args)
    if is_shared:
        join = None if hasattr(trainer, "_model_update_group") else _join_same_gpus
    elif sources.are_possible(trainer):
        join = None if sources.have_joined(trainer) else sources.join
    if join is not None and _together(trainer, join) is None:
        return
    if not is_shared and own_share(trainer).count == 1:
        _send_all(trainer)
        return
    sent = _together(trainer, _send_all)
    if sent is not None and not is_shared and dist.get_rank() == 0:
        own_group(trainer).encodings.sent = sum(sent)


def _join_same_gpus(trainer: Any) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 0 and requests_ray_collectives(trainer.strategy.args):
        run_log.warning("--vllm.sync_with_ray has no effect: trainer and engines share GPUs")
    join_workers_of_same_gpus(trainer)


def _send_all(trainer: Any) -> int:
    return send(trainer, synced_names(trainer))


def _together(trainer: Any, step: Callable[[Any], Any]) -> list[Any] | None:
    """Return what ``step`` returns on every rank; None if it has failed on one.

    Then all ranks leave their groups, since what a worker has read of the sync is unknown, and rank 0 raises
    the reasons of all, its own first, whose type the error has.
    """
    import torch.distributed as dist

    failure: Exception | None = None
    result = None
    try:
        result = step(trainer)
    except (SyncError, PeerError) as error:
        failure = error
    ends: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ends, (result, str(failure) if failure else None))
    reasons = [reason for _, reason in ends if reason]
    if not reasons:
        return [result for result, _ in ends]
    leave_group(trainer)
    if dist.get_rank() == 0:
        own = failure or SyncError(reasons[0])
        reasons = list(dict.fromkeys(reasons))  # rank 0's own may only be a consequence of another's
        if len(reasons) > 1:
            raise type(own)("; ".join(reasons[:MOST_NAMED])) from failure
        raise own
    return None


def sends_weights(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """Decorate ``broadcast_to_vllm``, which every rank calls: send in buckets, record, verify on request."""

    @wraps(method)
    def synced(trainer: Any) -> None:
        import torch.distributed as dist

        arguments = trainer.strategy.args
        with recorded_sync(trainer):
            if uses_ray_collectives(arguments):
                refuse_gloo_only("this run sends its weights by Ray's collectives")
                method(trainer)
                return
            devices.empty_cache()
            _send(trainer)
            if dist.get_rank() == 0:
                _forget_former_weights(trainer)
            devices.empty_cache()
            dist.barrier()
            devices.synchronize()

    return synced


def _forget_former_weights(trainer: Any) -> None:
    """Let the engines drop what they keep of computations with the former weights."""
    arguments = trainer.strategy.args
    prefixes = bool(getattr(arguments.vllm, "enable_prefix_caching", False))
    if prefixes or getattr(arguments.data, "max_images_per_prompt", None):
        dropped = [engine.forget_former_weights.remote(prefixes) for engine in trainer.vllm_engines]
        wait_for_engine_results(dropped, "the engines to reset their caches")
