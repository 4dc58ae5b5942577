"""The node of each trainer rank and engine worker, as a pure function of free resources and the request.

Each rank and each worker has a bundle of one GPU and one CPU. The bundles of an engine are placed on one node
whenever that is possible for all engines. An engine larger than every node takes whole nodes, as few as
possible. The rest goes to the trainer in blocks: ranks that communicate all the time (tensor parallelism
times ring attention) stay on a node while there is room, and a group takes few nodes.

Groups whose nodes must be distinct are placed first, where they leave room for the most engines (see
``strict_spread``). The number of engines that fit is exact for any sizes: it is the sum over nodes. The
number of blocks that fit next to them is exact too (see ``packing``). A run that needs all of several equal
nodes is placed uniformly (see ``uniform``).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from rlhf_stack.config import env_vars
from rlhf_stack.placement.model import (
    ROUNDING,
    FreeNode,
    PlacementError,
    Plan,
    Request,
    count_fitting,
    count_split,
    largest_node,
)
from rlhf_stack.placement.packing import Packing
from rlhf_stack.placement.strict_spread import place_strict_spread
from rlhf_stack.placement.uniform import uniform_plan

SHOWN_NODES = 16


Suits = Callable[[Request], bool]


def plan(
    nodes: Sequence[FreeNode],
    request: Request,
    allow_straddle: bool = False,
    suits: Suits = lambda _: True,
) -> Plan:
    """Return a placement of ``request`` on ``nodes``.

    Raises `PlacementError` if there is none; the message has the reason, the nodes, the request and what
    would fit and ``suits`` the run. With ``allow_straddle`` engines that fit on no node span several, as few
    engines as possible.
    """
    try:
        return _place(nodes, request, allow_straddle)
    except _NoRoom as reason:
        raise PlacementError(_explain_failure(nodes, request, str(reason), suits)) from None


def nearest_requests(
    nodes: Sequence[FreeNode], request: Request, suits: Suits = lambda _: True
) -> list[Request]:
    """Return similar requests that fit: at most one with fewer engines and one with smaller engines.

    ``suits`` says whether the run may have such engines. Engines that share the trainer's GPUs must use all
    of them, so only their size changes.
    """
    engines = request.engines
    if engines is None or not engines.count:
        return []
    free = [node.bundles for node in nodes]
    total = engines.count * engines.size
    found: list[Request] = []
    if not engines.shares:
        room = (sum(free) - request.size + total) // engines.size
        count = min(count_fitting(free, engines.size), room, engines.count - 1)
        fewer = replace(request, engines=replace(engines, count=count))
        found += _fits(nodes, fewer) if suits(fewer) else []
    for size in range(engines.size - 1, 0, -1):
        if engines.size % size == 0:
            smaller = replace(request, engines=replace(engines, size=size, count=total // size))
            if suits(smaller) and (fitting_request := _fits(nodes, smaller)):
                return found + fitting_request
    return found


class _NoRoom(Exception):
    """The reason why there is no placement."""


def _fits(nodes: Sequence[FreeNode], request: Request) -> list[Request]:
    """Return ``[request]`` if it can be placed, otherwise ``[]``."""
    if request.engines is None or request.engines.count < 1:
        return []
    try:
        _place(nodes, request, allow_straddle=False)
    except _NoRoom:
        return []
    return [request]


def _place(nodes: Sequence[FreeNode], request: Request, allow_straddle: bool) -> Plan:
    free = [node.bundles for node in nodes]
    if missing := describe_shortage(nodes, request):
        raise _NoRoom(missing)
    if even := uniform_plan(free, request):
        return even
    spread = place_strict_spread(free, request)
    if spread is None:
        raise _NoRoom(f"not enough nodes have enough free GPUs: {_spread_groups(request)}")
    for node in (node for group in spread.values() for node in group):
        free[node] -= 1
    others = tuple(group for group in request.groups if group.name not in spread)
    found = _pack(nodes, free, replace(request, groups=others), allow_straddle)
    split = {
        name: count for name, group in spread.items() if (count := count_split(group, request.tp_sp_size))
    }
    return replace(found, bundles=spread | found.bundles, split=split | found.split)


def _spread_groups(request: Request) -> str:
    return ", ".join(
        f"{group.name} needs {group.nodes} nodes with {group.gpus_per_node} each"
        for group in request.groups
        if group.strict_spread
    )


def _pack(nodes: Sequence[FreeNode], free: list[int], request: Request, allow_straddle: bool) -> Plan:
    """Place the groups and engines that may share nodes, on the ``free`` bundles of each node."""
    packing = Packing(free, request)
    engines = request.engines
    if engines is None or not engines.count:
        return packing.finish()
    if engines.size > largest_node(nodes):
        packing.place_wide(engines)
        return packing.finish()
    unit = _unit(free, request)
    units = engines.count * engines.size // unit
    local = min(units, count_fitting(free, unit))
    if local < units and not allow_straddle:
        raise _NoRoom(f"only {local} of {units} engines of {engines.size} GPUs fit on one node each")
    packing.place(engines, unit, units, local)
    return packing.finish()


def describe_shortage(nodes: Sequence[FreeNode], request: Request) -> str:
    """Describe the resource that is too scarce in total; empty if none."""
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
        return f"{request.size} GPUs are requested and {gpus} are free"
    if both < request.size:
        return (
            f"CPUs are missing: each of the {request.size} GPUs needs a CPU on its node, and only {both} "
            "free GPUs have one (start the nodes with more: ray start --num-cpus)"
        )
    if cpus < request.size + request.spare_cpus:
        return (
            f"CPUs are missing: {request.size} for the GPUs and {request.spare_cpus} for the controller are "
            f"needed, {cpus} are free (start the nodes with more: ray start --num-cpus)"
        )
    return ""


def _unit(free: Sequence[int], request: Request) -> int:
    """Return the bundles that belong on one node: an engine, or whole blocks of engines that share GPUs."""
    engines = request.engines
    if engines is None:
        return request.tp_sp_size
    if engines.shares:
        both = math.lcm(engines.size, request.tp_sp_size)
        count, rest = divmod(engines.count * engines.size, both)
        if not rest and count_fitting(free, both) >= count:
            return both
    return engines.size


def describe_request(request: Request) -> str:
    """Describe the groups and engines of ``request``."""
    parts = [f"{group.name} {group.nodes} x {group.gpus_per_node} GPUs" for group in request.groups]
    engines = request.engines
    if engines and engines.count:
        where = f" on the GPUs of {engines.shares}" if engines.shares else ""
        parts.append(f"{engines.count} engines x {engines.size} GPUs{where}")
    return ", ".join(parts) or "nothing"


def describe_free(nodes: Sequence[FreeNode]) -> str:
    """Describe the free resources of each node; in a large cluster those of the emptiest nodes."""
    order = sorted(nodes, key=lambda node: -node.gpus)[:SHOWN_NODES]
    shown = [
        f"{node.address}: {node.gpus:g} of {node.total_gpus:g} GPUs, {node.cpus:g} CPUs" for node in order
    ]
    more = [f"and {len(nodes) - SHOWN_NODES} nodes with no more"] if len(nodes) > SHOWN_NODES else []
    return "; ".join([*shown, *more]) or "no node"


def _explain_failure(nodes: Sequence[FreeNode], request: Request, reason: str, suits: Suits) -> str:
    lines = [
        f"cannot place this run: {reason}",
        f"requested: {describe_request(request)}",
        f"free: {describe_free(nodes)}",
    ]
    if found := nearest_requests(nodes, request, suits):
        lines.append(f"would fit: {' | '.join(describe_request(other) for other in found)}")
    if reason.startswith("only"):
        lines.append(f"{env_vars.ALLOW_STRADDLE}=1 lets engines straddle nodes, which is slow")
    return "\n  ".join(lines)
