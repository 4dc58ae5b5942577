"""Model of the placement of unpatched OpenRLHF on Ray, which predicts it without a cluster.

Ray's PACK policy sorts the bundles of a group with ``std::sort``, which is not stable: up to 16 equal bundles
keep their order, more are permuted, always in the same way. The node with the largest free share of the
resources of a bundle then takes as many bundles as fit, in that order; the next node follows. Source:
``bundle_scheduling_policy.cc`` and ``scorer.cc`` of Ray 2.9.3 to 2.60.0, and libstdc++'s ``stl_algo.h``.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlhf_stack.placement.model import ENGINES, FreeNode, Request, chunks

INSERTION_SORT = 16  # libstdc++ sorts up to 16 elements by insertion, which is stable


@dataclass(frozen=True)
class UpstreamLayout:
    """A predicted placement, nodes by index; ``pending`` is the first group that does not fit, or None."""

    bundles: dict[str, tuple[int, ...]]
    engines: tuple[tuple[int, ...], ...]
    straddling: tuple[int, ...]
    pending: str | None = None


def std_sort_order(count: int) -> list[int]:
    """The order in which libstdc++'s ``std::sort`` leaves ``count`` equal elements."""
    order = list(range(count))
    ranges = [(0, count)]
    while ranges:
        first, last = ranges.pop()
        while last - first > INSERTION_SORT:
            middle = first + (last - first) // 2
            order[first], order[middle] = order[middle], order[first]
            cut = _partition(order, first + 1, last)
            ranges.append((cut, last))
            last = cut
    return order


def _partition(order: list[int], first: int, last: int) -> int:
    """``std::__unguarded_partition`` with equal elements: swaps from both ends until they meet."""
    while True:
        last -= 1
        if first >= last:
            return first
        order[first], order[last] = order[last], order[first]
        first += 1


def pack(nodes: Sequence[FreeNode], count: int) -> tuple[int, ...] | None:
    """The node of each of ``count`` bundles of a GPU and a CPU in a PACK group; None if they do not fit.

    Among equal nodes, Ray's choice depends on their random ids; the model takes the lowest index.
    """
    waiting = std_sort_order(count)
    placed: dict[int, int] = {}
    usable = [index for index, node in enumerate(nodes) if node.gpus >= 1 and node.cpus >= 1]
    for best in sorted(usable, key=lambda index: (-_score(nodes[index]), index)):  # each is filled once
        room = int(min(nodes[best].gpus, nodes[best].cpus))
        placed |= dict.fromkeys(waiting[:room], best)
        waiting = waiting[room:]
        if not waiting:
            return tuple(placed[index] for index in range(count))
    return None if count else ()


def _score(node: FreeNode) -> float:
    """Ray's ``LeastResourceScorer`` for a bundle of one GPU and one CPU."""
    return (node.gpus - 1) / node.gpus + (node.cpus - 1) / node.cpus


def upstream_layout(nodes: Sequence[FreeNode], request: Request, order: Sequence[str]) -> UpstreamLayout:
    """The placement of OpenRLHF 0.11.2 as released: one PACK group after the other, engines cut by node.

    ``order`` is the order in which it creates the groups and `ENGINES`. Groups of one GPU per node have no
    placement group upstream; the model treats them as if they had one.
    """
    engines = request.engines
    shares = engines.shares if engines else None
    sizes = {group.name: group.size for group in request.groups}
    sizes[ENGINES] = engines.count * engines.size if engines else 0
    free = list(nodes)
    found: dict[str, tuple[int, ...]] = {}
    pending = None
    for name in order:
        placed = pack(free, sizes[name])
        if placed is None:
            pending = name
            break
        found[name] = placed
        for index, taken in Counter(placed).items():
            node = free[index]
            free[index] = replace(node, gpus=node.gpus - taken, cpus=node.cpus - taken)
    cut = _engines(found.get(shares or ENGINES, ()), engines.count, engines.size) if engines else ()
    straddling = tuple(index for index, nodes_of in enumerate(cut) if len(set(nodes_of)) > 1)
    return UpstreamLayout(found, cut, straddling, pending)


def _engines(bundles: Sequence[int], count: int, size: int) -> tuple[tuple[int, ...], ...]:
    """Upstream's ``get_bundle_indices``: bundles grouped by node in order of first use, cut into engines.

    An engine of one GPU takes the bundle with its own index instead.
    """
    if size == 1:
        return tuple(chunks(bundles, 1))[:count]
    by_node = {node: index for index, node in enumerate(dict.fromkeys(bundles))}
    return tuple(chunks(sorted(bundles, key=by_node.__getitem__), size))[:count]
