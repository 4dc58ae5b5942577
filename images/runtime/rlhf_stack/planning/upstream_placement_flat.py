"""Where OpenRLHF 0.5 on Ray puts a run: a group of whole-node bundles for each role, one for each engine.

Its groups are STRICT_SPREAD, with one bundle of all GPUs of a node in it; an engine of several GPUs has a
PACK group of its own. Ranks of a role of one GPU a node, and engines of one GPU, have no group: Ray puts each
where it likes, here on the first node with room.
"""

from collections.abc import Sequence
from dataclasses import replace

from rlhf_stack.placement.model import ENGINES, FreeNode, Group, Request
from rlhf_stack.planning.upstream_placement import UpstreamLayout, pack


def upstream_layout_flat(nodes: Sequence[FreeNode], request: Request) -> UpstreamLayout:
    """The layout of ``request``, whose groups are made in their order and then its engines."""
    left = list(nodes)
    bundles: dict[str, tuple[int, ...]] = {}
    for group in request.groups:
        placed = _spread(left, group) if group.gpus_per_node > 1 else _first(left, group.size)
        if placed is None:
            return UpstreamLayout(bundles, (), (), group.name)
        bundles[group.name] = placed
        left = _less(left, placed)
    engines: list[tuple[int, ...]] = []
    count, size = (request.engines.count, request.engines.size) if request.engines else (0, 1)
    for _ in range(count):
        placed = pack(left, size) if size > 1 else _first(left, 1)
        if placed is None:
            return UpstreamLayout(bundles, tuple(engines), _across(engines), ENGINES)
        engines.append(placed)
        left = _less(left, placed)
    return UpstreamLayout(bundles, tuple(engines), _across(engines))


def _spread(nodes: Sequence[FreeNode], group: Group) -> tuple[int, ...] | None:
    """The node of each rank: one bundle a node, on the nodes with the largest share left."""
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
    found = [index for index, node in enumerate(nodes) for _ in range(node.bundles)][:count]
    return tuple(found) if len(found) == count else None


def _less(nodes: Sequence[FreeNode], taken: Sequence[int]) -> list[FreeNode]:
    counts = [taken.count(index) for index in range(len(nodes))]
    return [
        replace(node, gpus=node.gpus - count, cpus=node.cpus - count)
        for node, count in zip(nodes, counts, strict=True)
    ]


def _across(engines: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(index for index, nodes in enumerate(engines) if len(set(nodes)) > 1)
