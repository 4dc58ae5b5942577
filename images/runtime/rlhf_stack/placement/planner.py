"""Which node each trainer rank and each engine worker sits on: a pure function of what is free and asked.

Every rank and every worker has a bundle of one GPU and one CPU. The bundles of an engine go on one node
whenever that is possible for all engines, and an engine that is larger than every node takes whole nodes, as
few as there can be. What is left goes to the trainer, in blocks: ranks that talk all the time (tensor
parallelism times ring attention) stay on a node as long as there is room, and a group takes few nodes.

Groups whose nodes have to differ go first, where they leave room for the most engines, see ``spreading``.
How many engines fit is exact for any sizes: it is the sum of what fits on each node. How many blocks fit
beside them is exact too, see ``packing``. A run that needs all of some equal nodes is spread evenly, see
``even``.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from rlhf_stack.config import env_vars
from rlhf_stack.placement.model import (
    ROUNDING,
    FreeNode,
    PlacementError,
    Plan,
    Request,
    across,
    fitting,
    largest,
)
from rlhf_stack.placement.packing import Packing
from rlhf_stack.placement.strict_spread import spread
from rlhf_stack.placement.uniform import even_plan

SHOWN_NODES = 16


def plan(nodes: Sequence[FreeNode], request: Request, allow_straddle: bool = False) -> Plan:
    """A place for everything in ``request``.

    `PlacementError` if there is none: its text has the reason, the nodes, what was asked and what would fit.
    ``allow_straddle`` lets engines for which no node has room take GPUs of several: as few as possible.
    """
    try:
        return _place(nodes, request, allow_straddle)
    except _NoRoom as reason:
        raise PlacementError(_explain(nodes, request, str(reason))) from None


def nearest(nodes: Sequence[FreeNode], request: Request) -> list[Request]:
    """Requests like ``request`` that fit: fewer engines of the same size, and smaller ones; at most one each.

    Engines that share the trainer's GPUs have to use all of them, so there only their size changes.
    """
    engines = request.engines
    if engines is None or not engines.count:
        return []
    free = [node.bundles for node in nodes]
    total = engines.count * engines.size
    found: list[Request] = []
    if not engines.shares:
        beside = (sum(free) - request.size + total) // engines.size
        count = min(fitting(free, engines.size), beside, engines.count - 1)
        found += _fits(nodes, replace(request, engines=replace(engines, count=count)))
    for size in range(engines.size - 1, 0, -1):
        if engines.size % size == 0:
            smaller = replace(engines, size=size, count=total // size)
            if fitting_request := _fits(nodes, replace(request, engines=smaller)):
                return found + fitting_request
    return found


class _NoRoom(Exception):
    """Why there is no place."""


def _fits(nodes: Sequence[FreeNode], request: Request) -> list[Request]:
    """``request`` if there is a place for it."""
    if request.engines is None or request.engines.count < 1:
        return []
    try:
        _place(nodes, request, allow_straddle=False)
    except _NoRoom:
        return []
    return [request]


def _place(nodes: Sequence[FreeNode], request: Request, allow_straddle: bool) -> Plan:
    free = [node.bundles for node in nodes]
    if missing := lack(nodes, request):
        raise _NoRoom(missing)
    if even := even_plan(free, request):
        return even
    apart = spread(free, request)
    if apart is None:
        raise _NoRoom(f"not enough nodes have so many GPUs left: {_spread_groups(request)}")
    for node in (node for group in apart.values() for node in group):
        free[node] -= 1
    others = tuple(group for group in request.groups if group.name not in apart)
    found = _pack(nodes, free, replace(request, groups=others), allow_straddle)
    split = {name: count for name, group in apart.items() if (count := across(group, request.block))}
    return replace(found, bundles=apart | found.bundles, split=split | found.split)


def _spread_groups(request: Request) -> str:
    return ", ".join(
        f"{group.name} wants {group.nodes} nodes with {group.gpus_per_node} each"
        for group in request.groups
        if group.spread
    )


def _pack(nodes: Sequence[FreeNode], free: list[int], request: Request, allow_straddle: bool) -> Plan:
    """A place for what may share nodes as it likes, on the ``free`` bundles of each node."""
    packing = Packing(free, request)
    engines = request.engines
    if engines is None or not engines.count:
        return packing.finish()
    if engines.size > largest(nodes):
        packing.place_wide(engines)
        return packing.finish()
    unit = _unit(free, request)
    units = engines.count * engines.size // unit
    local = min(units, fitting(free, unit))
    if local < units and not allow_straddle:
        raise _NoRoom(f"only {local} of {units} engines of {engines.size} GPUs fit on one node each")
    packing.place(engines, unit, units, local)
    return packing.finish()


def lack(nodes: Sequence[FreeNode], request: Request) -> str:
    """What there is too little of; empty if nothing."""
    engines = request.engines
    shared = {group.name: group.size for group in request.groups}
    if engines and engines.shares and engines.count * engines.size > shared[engines.shares]:
        return (
            f"{engines.count} engines of {engines.size} GPUs cannot share "
            f"the {shared[engines.shares]} GPUs of {engines.shares}"
        )
    both = sum(node.bundles for node in nodes)
    gpus = sum(int(node.gpus + ROUNDING) for node in nodes)
    cpus = sum(int(node.cpus + ROUNDING) for node in nodes)
    if gpus < request.size:
        return f"{request.size} GPUs are asked for and {gpus} are free"
    if both < request.size:
        return (
            f"CPUs are missing: each of the {request.size} GPUs needs a CPU on its node, and that is so for "
            f"{both} free GPUs (start the nodes with more: ray start --num-cpus)"
        )
    if cpus < request.size + request.spare_cpus:
        return (
            f"CPUs are missing: {request.size} for the GPUs and {request.spare_cpus} for the controller are "
            f"needed, {cpus} are free (start the nodes with more: ray start --num-cpus)"
        )
    return ""


def _unit(free: Sequence[int], request: Request) -> int:
    """Bundles that go on a node together: an engine's, and of engines that share GPUs whole blocks' too."""
    engines = request.engines
    if engines is None:
        return request.block
    if engines.shares:
        both = math.lcm(engines.size, request.block)
        count, rest = divmod(engines.count * engines.size, both)
        if not rest and fitting(free, both) >= count:
            return both
    return engines.size


def asked(request: Request) -> str:
    """What is asked for, in words."""
    parts = [f"{group.name} {group.nodes} x {group.gpus_per_node} GPUs" for group in request.groups]
    engines = request.engines
    if engines and engines.count:
        where = f" on the GPUs of {engines.shares}" if engines.shares else ""
        parts.append(f"{engines.count} engines x {engines.size} GPUs{where}")
    return ", ".join(parts) or "nothing"


def free_resources(nodes: Sequence[FreeNode]) -> str:
    """What each node has left, in words; of a large cluster the emptiest nodes."""
    order = sorted(nodes, key=lambda node: -node.gpus)[:SHOWN_NODES]
    shown = [
        f"{node.address}: {node.gpus:g} of {node.total_gpus:g} GPUs, {node.cpus:g} CPUs" for node in order
    ]
    more = [f"and {len(nodes) - SHOWN_NODES} nodes with no more"] if len(nodes) > SHOWN_NODES else []
    return "; ".join([*shown, *more]) or "no node"


def _explain(nodes: Sequence[FreeNode], request: Request, reason: str) -> str:
    lines = [
        f"cannot place this run: {reason}",
        f"asked: {asked(request)}",
        f"free: {free_resources(nodes)}",
    ]
    if found := nearest(nodes, request):
        lines.append(f"would fit: {' | '.join(asked(other) for other in found)}")
    if reason.startswith("only"):
        lines.append(f"{env_vars.ALLOW_STRADDLE}=1 lets engines straddle nodes, which is slow")
    return "\n  ".join(lines)
