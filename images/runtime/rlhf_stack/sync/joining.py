"""Formation of the sync group of a run: the trainer listens, and the engines' workers are told where."""

import socket
from typing import Any

from rlhf_stack.accelerator import devices
from rlhf_stack.sync import same_gpu
from rlhf_stack.sync.actor_waits import wait_for_engine_results
from rlhf_stack.sync.backend import create_group, requested_backend

WHAT = "the engines to join the weight-sync group"


def join_engines(trainer: Any) -> None:
    """Form the group of rank 0 of ``ActorPPOTrainer``, which calls this, and all engine workers."""
    import ray

    arguments = trainer.strategy.args
    backend, size = requested_backend(arguments), arguments.vllm.tensor_parallel_size
    world = 1 + arguments.vllm.num_engines * size
    host = ray.util.get_node_ip_address()
    with socket.socket() as free:
        free.bind((host, 0))
        port = free.getsockname()[1]
    references = [
        engine.call_workers.remote("join_weight_group", host, port, 1 + index * size, world, backend)
        for index, engine in enumerate(trainer.vllm_engines)
    ]
    trainer._model_update_group = create_group(host, port, 0, world, devices.current_device(), backend)
    wait_for_engine_results(references, WHAT)


def join_workers_of_same_gpus(trainer: Any) -> None:
    """Let every trainer rank, each of which calls this, form a group with the engine worker on its GPU."""
    import torch.distributed as dist

    offer = same_gpu.Offer(devices.physical_gpu_id())
    offers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(offers, (offer.gpu, offer.address))
    references = []
    if dist.get_rank() == 0:
        references = [
            engine.call_workers.remote("join_same_gpu", dict(offers)) for engine in trainer.vllm_engines
        ]
    trainer._model_update_group = offer.accept()
    wait_for_engine_results(references, WHAT)
