"""Trainer ranks that send the weights over gloo: with several, each sends a share of the buckets.

Each has a sync group of its own with all engine workers, so that a sync uses the links of several nodes. The
first is rank 0, whose group `joining.join_engines` forms; the others join at the first sync after that.
"""

from collections.abc import Sequence
from typing import Any

from rlhf_stack.accelerator import devices
from rlhf_stack.cluster.actor_registry import PeerError
from rlhf_stack.config import env_vars
from rlhf_stack.lazy import ray
from rlhf_stack.sync.actor_waits import wait_for_engine_results
from rlhf_stack.sync.backend import create_group
from rlhf_stack.sync.buckets import Share
from rlhf_stack.sync.errors import SyncError
from rlhf_stack.sync.gloo import GlooGroup
from rlhf_stack.sync.joining import WHAT, engine_calls
from rlhf_stack.sync.membership import end_formation, listen
from rlhf_stack.sync.trainer import own_group, shares_gpus

MOST_SELECTED = 8  # a few fill the links of the engines, and each has a connection to every worker


def are_possible(trainer: Any) -> bool:
    """Report whether several trainer ranks may send; the same on every rank."""
    import torch.distributed as dist

    number = env_vars.sync_sources()
    is_possible = dist.get_world_size() > 1 if number is None else number > 1
    return is_possible and not shares_gpus(trainer.strategy.args)


def have_joined(trainer: Any) -> bool:
    """Report whether this trainer rank knows its share of the present sync group."""
    return hasattr(trainer, "_weight_share")


def select(nodes: Sequence[str], number: int | None) -> list[int]:
    """Return the trainer ranks that send, from rank 0 on, on as many nodes as possible.

    ``nodes`` are the addresses of all ranks' nodes; None as ``number`` means one rank on each node, up to
    `MOST_SELECTED` of them.
    `SyncError` if there are fewer ranks than ``number``.
    """
    if number is not None and number > len(nodes):
        raise SyncError(f"{env_vars.SYNC_SOURCES}={number}: the trainer has {len(nodes)} ranks")
    turns = [list(nodes[:rank]).count(node) for rank, node in enumerate(nodes)]  # of each rank on its node
    order = sorted(range(len(nodes)), key=lambda rank: (turns[rank], rank))
    return order[: min(len(set(nodes)), MOST_SELECTED) if number is None else number]


def join(trainer: Any) -> None:
    """Let every trainer rank, each of which calls this, join the engine workers if it sends weights.

    `SyncError` on the ranks that cannot.
    """
    import torch.distributed as dist

    rank, number = dist.get_rank(), env_vars.sync_sources()
    host = ray.util.get_node_ip_address()
    is_gloo = rank != 0 or isinstance(own_group(trainer), GlooGroup)
    facts: list[Any] = [None] * dist.get_world_size()
    with listen(host) as listener:
        own = host, listener.getsockname()[1], len(trainer.vllm_engines), is_gloo
        dist.all_gather_object(facts, own)
        nodes = [node for node, *_ in facts]
        senders = select(nodes, number) if all(gloo for *_, gloo in facts) else [0]
        trainer._weight_share = Share(senders.index(rank) if rank in senders else 0, len(senders))
        if len(senders) == 1:
            return
        size = trainer.strategy.args.vllm.tensor_parallel_size
        world = 1 + facts[0][2] * size
        if rank == 0:
            endpoints = [facts[sender][:2] for sender in senders[1:]]
            try:
                references = [
                    call("join_weight_sources", endpoints, 1 + index * size, world)
                    for index, call in enumerate(engine_calls(trainer.vllm_engines))
                ]
                wait_for_engine_results(references, WHAT)
            except (SyncError, PeerError) as error:
                for node, port in endpoints:
                    end_formation(node, port, str(error))
                raise
        elif rank in senders:
            where = *own[:2], 0, world
            trainer._model_update_group = create_group(*where, devices.current_device(), "gloo", listener)
