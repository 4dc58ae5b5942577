"""The same on every node: of a run whose groups need all of some equal nodes, as its flags ask for it.

A group of 2 x 6 ranks on two nodes of 8 GPUs lies across both whatever is done. With 6 on each, and engines
in what is left of each, every node sends and receives as much as the others; with 8 and 4, one sends twice.
"""

from collections.abc import Sequence

from rlhf_stack.placement.model import ENGINES, Plan, Request, chunks


def even_plan(free: Sequence[int], request: Request) -> Plan | None:
    """That plan on nodes with so many ``free`` bundles; None where there is none, or fewer nodes would do.

    Nodes without any, such as a head without GPUs, do not count.
    """
    nodes = [index for index, bundles in enumerate(free) if bundles]
    rooms = {free[index] for index in nodes}
    engines, groups, count = request.engines, request.groups, len(nodes)
    if not groups or len(rooms) != 1 or (engines and (engines.shares or engines.count % count)):
        return None
    room = rooms.pop()
    if any(group.nodes != count or group.size <= room * (count - 1) or count == 1 for group in groups):
        return None
    if any(group.gpus_per_node % request.block for group in groups):
        return None
    of_engines = engines.count * engines.size // count if engines else 0
    if of_engines + sum(group.gpus_per_node for group in groups) > room:
        return None
    bundles = {
        group.name: tuple(node for node in nodes for _ in range(group.gpus_per_node)) for group in groups
    }
    workers = [node for node in nodes for _ in range(of_engines)]
    if engines and engines.count:
        bundles[ENGINES] = tuple(workers)
    return Plan(bundles, tuple(chunks(workers, engines.size if engines else 1)))
