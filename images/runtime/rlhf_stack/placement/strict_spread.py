"""Placement of groups whose nodes must be distinct, as OpenRLHF 0.5 requires.

Such a group has one piece per node. The nodes of the pieces decide how many engines fit next to them: a piece
of two GPUs costs an engine of four GPUs on a node with 8 free, and none on one with 6. A greedy choice of the
cheapest node is nearly always good enough. Where it is not, all placements are searched node by node: time
and memory grow with the relevant nodes times the unplaced pieces of each group.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

from rlhf_stack.placement.model import Group, Request, count_fitting

MAX_STEPS = 2_000_000  # steps of a search, a few seconds; larger problems keep the greedy choice

Pieces = dict[str, list[int]]  # the node of each piece by group name
Unplaced = tuple[int, ...]  # number of unplaced pieces by group


def place_strict_spread(free: Sequence[int], request: Request) -> dict[str, tuple[int, ...]] | None:
    """Return the node of each rank of each strictly spread group of ``request``; None if impossible.

    ``free`` is the number of free bundles by node. As many of the request's engines as possible fit on the
    rest.
    """
    spread = [group for group in request.groups if group.strict_spread]
    groups = sorted(spread, key=lambda group: -group.gpus_per_node)
    if not groups:
        return {}
    engines = request.engines
    count, size = (engines.count, engines.size) if engines and not engines.shares else (0, 1)
    found = _greedy(free, groups, size)
    left = None if found is None else count_fitting(_without(free, groups, found), size)
    if left is None or left < min(count, count_fitting(free, size)):
        found = _search(free, groups, size) or found
    if found is None:
        return None
    return {
        group.name: tuple(node for node in sorted(found[group.name]) for _ in range(group.gpus_per_node))
        for group in groups
    }


def _greedy(free: Sequence[int], groups: Sequence[Group], size: int) -> Pieces | None:
    """Place each piece, large ones first, where it costs the fewest engines, then by best fit."""
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


def _search(free: Sequence[int], groups: Sequence[Group], size: int) -> Pieces | None:
    """Return the best placement; None if there is none or the search needs more than `MAX_STEPS` steps."""
    nodes = _relevant_nodes(free, groups)
    everything: Unplaced = tuple(group.nodes for group in groups)
    states = 1
    for pieces in everything:
        states *= pieces + 1
    if states * len(nodes) << len(groups) > MAX_STEPS:
        return None
    best: dict[Unplaced, int] = {everything: 0}
    choices: list[dict[Unplaced, tuple[int, ...]]] = []
    for node in nodes:
        following: dict[Unplaced, int] = {}
        choice: dict[Unplaced, tuple[int, ...]] = {}
        for left, engines in best.items():
            for taken, room in _on_one_node(free[node], left, groups):
                after = tuple(pieces - (index in taken) for index, pieces in enumerate(left))
                total = engines + room // size
                if total > following.get(after, -1):
                    following[after], choice[after] = total, taken
        best = following
        choices.append(choice)
    state: Unplaced = (0,) * len(groups)
    if state not in best:
        return None
    found: Pieces = {group.name: [] for group in groups}
    for node, choice in zip(reversed(nodes), reversed(choices), strict=True):
        taken = choice[state]
        for index in taken:
            found[groups[index].name].append(node)
        state = tuple(pieces + (index in taken) for index, pieces in enumerate(state))
    return found


def _relevant_nodes(free: Sequence[int], groups: Sequence[Group]) -> list[int]:
    """Return nodes on which a piece fits; of nodes with equal room at most as many as there are pieces."""
    smallest, pieces = min(group.gpus_per_node for group in groups), sum(group.nodes for group in groups)
    seen: Counter[int] = Counter()
    found = []
    for node, room in enumerate(free):
        seen[room] += 1
        if room >= smallest and seen[room] <= pieces:
            found.append(node)
    return found


def _on_one_node(room: int, left: Unplaced, groups: Sequence[Group]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield each set of groups, by index, that place a piece on a node, with the remaining room."""
    waiting = [index for index, pieces in enumerate(left) if pieces]
    for count in range(len(waiting) + 1):
        for taken in combinations(waiting, count):
            rest = room - sum(groups[index].gpus_per_node for index in taken)
            if rest >= 0:
                yield taken, rest
