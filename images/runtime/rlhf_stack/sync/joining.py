"""Formation of the sync group of a run: the trainer listens, and the workers of the engines connect to it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from rlhf_stack.accelerator import devices
from rlhf_stack.cluster.actor_registry import PeerError
from rlhf_stack.cluster.answer_once import idempotent
from rlhf_stack.cluster.host import free_port
from rlhf_stack.lazy import ray
from rlhf_stack.sync import same_gpu
from rlhf_stack.sync.actor_waits import raise_engine_error, wait_for_engine_results
from rlhf_stack.sync.backend import create_group, requested_backend
from rlhf_stack.sync.errors import SyncError
from rlhf_stack.sync.trainer import own_group

WHAT = "the engines to join the weight-sync group"


def join_engines(trainer: Any) -> None:
    """Form the group of rank 0 of ``ActorPPOTrainer``, which calls this, and all engine workers."""
    arguments = trainer.strategy.args
    backend, size = requested_backend(arguments), arguments.vllm.tensor_parallel_size
    world = 1 + len(trainer.vllm_engines) * size
    host = ray.util.get_node_ip_address()
    port = free_port(host)
    references = [
        call("join_weight_group", host, port, 1 + index * size, world, backend)
        for index, call in enumerate(_calls(trainer.vllm_engines))
    ]
    try:
        group = create_group(host, port, 0, world, devices.current_device(), backend)
    except SyncError:
        raise_engine_error(references)  # it is the cause
        raise
    trainer._model_update_group = group
    wait_for_engine_results(references, WHAT)


def join_workers_of_same_gpus(trainer: Any) -> None:
    """Let every trainer rank, each of which calls this, form a group with the engine worker on its GPU.

    A rank has none if the engine on its GPU was lost.
    """
    import torch.distributed as dist

    offer = same_gpu.Offer(devices.physical_gpu_id())
    is_root = dist.get_rank() == 0
    shared: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        shared, (offer.gpu, offer.address, _gpus(trainer.vllm_engines) if is_root else None)
    )
    gpus, failure = shared[0][2]
    if failure:
        raise SyncError(failure)
    offers = {gpu: address for gpu, address, _ in shared}
    references = []
    if is_root:
        references = [call("join_same_gpu", offers) for call in _calls(trainer.vllm_engines)]
    if offer.gpu in gpus:
        trainer._model_update_group = offer.accept()
    else:
        offer.withdraw()
        trainer._model_update_group = None
    wait_for_engine_results(references, WHAT)


def leave_group(trainer: Any) -> None:
    """Close the sync group of this trainer rank, if it has one, so that another can be formed."""
    if (group := own_group(trainer)) is not None:
        group.close()
    if hasattr(trainer, "_model_update_group"):
        del trainer._model_update_group


def _calls(engines: Sequence[Any]) -> list[Callable[..., Any]]:
    """Return, for each engine, what calls a method of its workers; a restarted engine refuses the call."""
    asked = [idempotent(engine.process) for engine in engines]
    processes = wait_for_engine_results(asked, "the engines")
    return [
        functools.partial(engine.call_workers_of.remote, process)
        for engine, process in zip(engines, processes, strict=True)
    ]


def _gpus(engines: Sequence[Any]) -> tuple[list[str], str]:
    """Return the GPUs of the engines' workers, and the error with which an engine did not report them."""
    try:
        answers = wait_for_engine_results([engine.where.remote() for engine in engines], "the engines' GPUs")
    except (SyncError, PeerError) as error:
        return [], str(error)
    return [str(worker["gpu"]) for workers in answers for worker in workers], ""
