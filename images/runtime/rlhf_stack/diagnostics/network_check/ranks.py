"""On which node each rank of a weight-sync group is: the trainer's rank 0 first, then all engine workers."""

from collections.abc import Callable, Sequence

from rlhf_stack.errors import UserError
from rlhf_stack.placement import FreeNode, PlacementError, Request, plan

Ranks = Callable[[Sequence[FreeNode]], list[int]]


def once_each(nodes: Sequence[FreeNode]) -> list[int]:
    """The trainer on the first node, and an engine worker on every node."""
    return [0, *range(len(nodes))]


def of_run(request: Request) -> Ranks:
    """Where the ranks of a run would be; a `UserError` if it has no place or no engines."""

    def ranks(nodes: Sequence[FreeNode]) -> list[int]:
        try:
            found = plan(nodes, request)
        except PlacementError as error:
            raise UserError(str(error)) from None
        if not found.engines:
            raise UserError("this run has no engines, and nothing to sync")
        return [
            found.bundles[request.groups[0].name][0],
            *(node for engine in found.engines for node in engine),
        ]

    return ranks
