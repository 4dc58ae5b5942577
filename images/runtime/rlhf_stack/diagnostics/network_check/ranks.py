"""The node of each rank of a weight-sync group: first the trainer's rank 0, then all engine workers."""

from collections.abc import Callable, Sequence

from rlhf_stack.config import env_vars
from rlhf_stack.errors import UserError
from rlhf_stack.placement import FreeNode, PlacementError, Request, plan

Ranks = Callable[[Sequence[FreeNode]], list[int]]


def one_worker_per_node(nodes: Sequence[FreeNode]) -> list[int]:
    """The trainer on the first node, and one engine worker on every node."""
    return [0, *range(len(nodes))]


def with_own_gpus(nodes: Sequence[FreeNode], ranks: Sequence[int]) -> list[int]:
    """The first ranks of each node, as many as it has GPUs: NCCL refuses two ranks on one.

    Without the others, such as those of engines that share the trainer's GPUs, each GPU still has a rank.
    """
    left = [node.total_gpus for node in nodes]
    kept = []
    for node in ranks:
        if left[node] >= 1:
            left[node] -= 1
            kept.append(node)
    return kept


def ranks_of_run(request: Request) -> Ranks:
    """The ranks of a planned run; `UserError` if it cannot be placed or has no engines."""

    def ranks(nodes: Sequence[FreeNode]) -> list[int]:
        try:
            found = plan(nodes, request, env_vars.flag(env_vars.ALLOW_STRADDLE))
        except PlacementError as error:
            raise UserError(str(error)) from None
        if not found.engines:
            raise UserError("this run has no engines, so there is no weight sync")
        return [
            found.bundles[request.groups[0].name][0],
            *(node for engine in found.engines for node in engine),
        ]

    return ranks
