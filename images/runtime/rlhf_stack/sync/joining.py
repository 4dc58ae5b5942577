"""Formation of the sync group of a run: the trainer listens, and the workers of the engines connect to it."""

import functools
import socket
from collections.abc import Callable, Sequence
from typing import Any

from rlhf_stack.accelerator import devices
from rlhf_stack.cluster.actor_registry import PeerError
from rlhf_stack.cluster.answer_once import idempotent
from rlhf_stack.lazy import ray
from rlhf_stack.sync import same_gpu
from rlhf_stack.sync.actor_waits import raise_engine_error, wait_for_engine_results
from rlhf_stack.sync.backend import create_group, requested_backend
from rlhf_stack.sync.errors import SyncError
from rlhf_stack.sync.membership import listen
from rlhf_stack.sync.trainer import engine_indices, own_group

WHAT = "the engines to join the weight-sync group"


def join_engines(trainer: Any) -> None:
    """Form the group of rank 0 of ``ActorPPOTrainer``, which calls this, and all engine workers."""
    arguments = trainer.strategy.args
    backend, size = requested_backend(arguments), arguments.vllm.tensor_parallel_size
    world = 1 + len(trainer.vllm_engines) * size
    host = ray.util.get_node_ip_address()
    with listen(host) as listener:
        port = listener.getsockname()[1]
        references = [
            call("join_weight_group", host, port, 1 + index * size, world, backend)
            for index, call in enumerate(engine_calls(trainer.vllm_engines))
        ]
        where, watch = (host, port, 0, world), lambda: raise_engine_error(references)
        try:
            group = create_group(*where, devices.current_device(), backend, listener, watch=watch)
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

    is_root, who = dist.get_rank() == 0, f"trainer rank {dist.get_rank()} on {socket.gethostname()}"
    offer = same_gpu.Offer(devices.physical_gpu_id(), who)
    shared: list[Any] = [None] * dist.get_world_size()
    workers = _workers(trainer) if is_root else None
    dist.all_gather_object(shared, (offer.gpu, who, offer.address, workers))
    workers, failure = shared[0][3]
    if failure := failure or same_gpu.mismatch([(gpu, name) for gpu, name, *_ in shared], workers):
        offer.withdraw()
        raise SyncError(failure)
    gpus, offers = {gpu for gpu, _ in workers}, {gpu: address for gpu, _, address, _ in shared}
    references: list[Any] = []
    if is_root:
        references = [call("join_same_gpu", offers) for call in engine_calls(trainer.vllm_engines)]
    if offer.gpu in gpus:
        trainer._model_update_group = offer.accept(lambda: raise_engine_error(references))
    else:
        offer.withdraw()
        trainer._model_update_group = None
    wait_for_engine_results(references, WHAT)


def leave_group(trainer: Any) -> None:
    """Close the sync group of this trainer rank, if it has one, so that another can be formed."""
    if (group := own_group(trainer)) is not None:
        group.close()
    for attribute in ("_model_update_group", "_weight_share"):
        vars(trainer).pop(attribute, None)


def engine_calls(engines: Sequence[Any]) -> list[Callable[..., Any]]:
    """Return, for each engine, what calls a method of its workers; a restarted engine refuses the call."""
    asked = [idempotent(engine.process) for engine in engines]
    processes = wait_for_engine_results(asked, "the engines")
    return [
        functools.partial(engine.call_workers_of.remote, process)
        for engine, process in zip(engines, processes, strict=True)
    ]


def _workers(trainer: Any) -> tuple[list[tuple[str, str]], str]:
    """Return GPU and name of the engines' workers, and the error with which an engine did not report them."""
    references = [engine.where.remote() for engine in trainer.vllm_engines]
    try:
        answers = wait_for_engine_results(references, "the engines' GPUs")
    except (SyncError, PeerError) as error:
        return [], str(error)
    return [
        (str(worker["gpu"]), f"rank {worker['rank']} of engine {index} on {worker['host']}")
        for index, workers in zip(engine_indices(trainer), answers, strict=True)
        for worker in workers
    ], ""
