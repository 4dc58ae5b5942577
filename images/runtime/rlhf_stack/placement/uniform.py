"""A uniform plan for a run whose flags need all of several equal nodes: the same ranks on each node.

A group of 2 x 6 ranks on two nodes of 8 GPUs spans both in any plan. With 6 on each, and engines on the rest,
all nodes send and receive equally; with 8 and 4, one sends twice as much.
"""

from collections.abc import Sequence

from rlhf_stack.placement.model import ENGINES, Plan, Request, chunks


def uniform_plan(free: Sequence[int], request: Request) -> Plan | None:
    """Return the uniform plan for ``free`` bundles by node; None if there is none or fewer nodes suffice.

    Nodes without free bundles, such as a head without GPUs, are ignored.
    """
    nodes = [index for index, bundles in enumerate(free) if bundles]
    rooms = {free[index] for index in nodes}
    engines, groups, count = request.engines, request.groups, len(nodes)
    if not groups or len(rooms) != 1 or (engines and (engines.shares or engines.count % count)):
        return None
    room = rooms.pop()
    if any(group.nodes != count or group.size <= room * (count - 1) or count == 1 for group in groups):
        return None
    if any(group.gpus_per_node % request.tp_sp_size for group in groups):
        return None
    engine_bundles = engines.count * engines.size // count if engines else 0
    if engine_bundles + sum(group.gpus_per_node for group in groups) > room:
        return None
    bundles = {
        group.name: tuple(node for node in nodes for _ in range(group.gpus_per_node)) for group in groups
    }
    workers = [node for node in nodes for _ in range(engine_bundles)]
    if engines and engines.count:
        bundles[ENGINES] = tuple(workers)
    return Plan(bundles, tuple(chunks(workers, engines.size if engines else 1)))
