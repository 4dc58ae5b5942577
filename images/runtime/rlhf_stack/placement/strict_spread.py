"""Where groups go of which each node has to be another one, as OpenRLHF 0.5 wants them.

Such a group is as many pieces as it wants nodes, no two on one node. Where the pieces go decides how many
engines fit beside them: a piece of two GPUs costs an engine of four on a node with 8 left, and none on one
with 6. Piece after piece where it costs least is nearly always good enough. Where it is not, all placements
are searched, node by node: time and memory grow with the nodes that can matter, times the pieces that are
left of each group.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

from rlhf_stack.placement.model import Group, Request, fitting

SEARCHED = 2_000_000  # steps of a search, a few seconds; what is larger keeps to the cheapest place

Pieces = dict[str, list[int]]  # the node of each piece by the name of its group
Left = tuple[int, ...]  # pieces that are left of each group


def spread(free: Sequence[int], request: Request) -> dict[str, tuple[int, ...]] | None:
    """The node of each rank of each group of ``request`` whose nodes differ; None if there is no place.

    ``free`` is bundles by node. As many of the request's engines as possible, at most all, fit beside them.
    """
    groups = sorted((group for group in request.groups if group.spread), key=lambda g: -g.gpus_per_node)
    if not groups:
        return {}
    engines = request.engines
    count, size = (engines.count, engines.size) if engines and not engines.shares else (0, 1)
    found = _cheapest(free, groups, size)
    left = None if found is None else fitting(_without(free, groups, found), size)
    if left is None or left < min(count, fitting(free, size)):
        found = _searched(free, groups, size) or found
    if found is None:
        return None
    return {
        group.name: tuple(node for node in sorted(found[group.name]) for _ in range(group.gpus_per_node))
        for group in groups
    }


def _cheapest(free: Sequence[int], groups: Sequence[Group], size: int) -> Pieces | None:
    """Each piece, the large ones first, where it costs the fewest engines, then where it fits best."""
    left = list(free)
    found: Pieces = {}
    for group in groups:
        piece = group.gpus_per_node
        order = sorted(
            (node for node, room in enumerate(left) if room >= piece),
            key=lambda node: (left[node] // size - (left[node] - piece) // size, left[node], node),
        )
        if len(order) < group.nodes:
            return None
        found[group.name] = order[: group.nodes]
        for node in found[group.name]:
            left[node] -= piece
    return found


def _without(free: Sequence[int], groups: Sequence[Group], found: Pieces) -> list[int]:
    left = list(free)
    for group in groups:
        for node in found[group.name]:
            left[node] -= group.gpus_per_node
    return left


def _searched(free: Sequence[int], groups: Sequence[Group], size: int) -> Pieces | None:
    """The best place of all; None if there is none, or more than `SEARCHED` steps would be needed."""
    nodes = _that_matter(free, groups)
    everything: Left = tuple(group.nodes for group in groups)
    states = 1
    for pieces in everything:
        states *= pieces + 1
    if states * len(nodes) << len(groups) > SEARCHED:
        return None
    best: dict[Left, int] = {everything: 0}
    choices: list[dict[Left, tuple[int, ...]]] = []
    for node in nodes:
        following: dict[Left, int] = {}
        choice: dict[Left, tuple[int, ...]] = {}
        for left, engines in best.items():
            for taken, room in _on_one_node(free[node], left, groups):
                after = tuple(pieces - (index in taken) for index, pieces in enumerate(left))
                total = engines + room // size
                if total > following.get(after, -1):
                    following[after], choice[after] = total, taken
        best = following
        choices.append(choice)
    state: Left = (0,) * len(groups)
    if state not in best:
        return None
    found: Pieces = {group.name: [] for group in groups}
    for node, choice in zip(reversed(nodes), reversed(choices), strict=True):
        taken = choice[state]
        for index in taken:
            found[groups[index].name].append(node)
        state = tuple(pieces + (index in taken) for index, pieces in enumerate(state))
    return found


def _that_matter(free: Sequence[int], groups: Sequence[Group]) -> list[int]:
    """Nodes on which a piece fits; of those with equally much room no more than there are pieces."""
    smallest, pieces = min(group.gpus_per_node for group in groups), sum(group.nodes for group in groups)
    seen: Counter[int] = Counter()
    found = []
    for node, room in enumerate(free):
        seen[room] += 1
        if room >= smallest and seen[room] <= pieces:
            found.append(node)
    return found


def _on_one_node(room: int, left: Left, groups: Sequence[Group]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Every choice of groups, by index, of which a piece goes on a node, and the room that it leaves."""
    waiting = [index for index, pieces in enumerate(left) if pieces]
    for count in range(len(waiting) + 1):
        for taken in combinations(waiting, count):
            rest = room - sum(groups[index].gpus_per_node for index in taken)
            if rest >= 0:
                yield taken, rest
