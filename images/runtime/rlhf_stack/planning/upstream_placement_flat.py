"""Model of the placement of unpatched OpenRLHF 0.5 on Ray: one placement group per role and per engine.

The group of a role is STRICT_SPREAD, with one bundle per node for all its GPUs there; an engine of several
GPUs has a PACK group. Roles with one GPU per node and engines of one GPU have no group: Ray chooses any node,
the model the first one with room.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rlhf_stack.placement.model import ENGINES, FreeNode, Group, Request
from rlhf_stack.planning.upstream_placement import UpstreamLayout, pack


def upstream_layout_flat(nodes: Sequence[FreeNode], request: Request) -> UpstreamLayout:
    """The placement of ``request``: its groups in order, then its engines."""
    free = list(nodes)
    bundles: dict[str, tuple[int, ...]] = {}
    for group in request.groups:
        placed = _spread(free, group) if group.gpus_per_node > 1 else _first(free, group.size)
        if placed is None:
            return UpstreamLayout(bundles, (), (), group.name)
        bundles[group.name] = placed
        free = _less(free, placed)
    engines: list[tuple[int, ...]] = []
    count, size = (request.engines.count, request.engines.size) if request.engines else (0, 1)
    for _ in range(count):
        placed = pack(free, size) if size > 1 else _first(free, 1)
        if placed is None:
            return UpstreamLayout(bundles, tuple(engines), _across(engines), ENGINES)
        engines.append(placed)
        free = _less(free, placed)
    return UpstreamLayout(bundles, tuple(engines), _across(engines))


def _spread(nodes: Sequence[FreeNode], group: Group) -> tuple[int, ...] | None:
    """The node of each rank: one bundle per node, on the nodes with the largest free share."""
    size = group.gpus_per_node
    room = [index for index, node in enumerate(nodes) if node.bundles >= size]
    if len(room) < group.nodes:
        return None
    shares = {
        index: (nodes[index].gpus - size) / nodes[index].gpus + (nodes[index].cpus - size) / nodes[index].cpus
        for index in room
    }
    best = sorted(room, key=lambda index: (-shares[index], index))[: group.nodes]
    return tuple(index for index in best for _ in range(size))


def _first(nodes: Sequence[FreeNode], count: int) -> tuple[int, ...] | None:
    """``count`` bundles on the first nodes with room."""
    bundles = (index for index, node in enumerate(nodes) for _ in range(node.bundles))
    found = tuple(itertools.islice(bundles, count))
    return found if len(found) == count else None


def _less(nodes: Sequence[FreeNode], taken: Sequence[int]) -> list[FreeNode]:
    left = list(nodes)
    for index, count in Counter(taken).items():
        left[index] = replace(left[index], gpus=left[index].gpus - count, cpus=left[index].cpus - count)
    return left


def _across(engines: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(index for index, nodes in enumerate(engines) if len(set(nodes)) > 1)
