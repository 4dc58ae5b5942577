"""A plan made true in Ray: what is free, groups whose bundles are pinned to nodes, and waits that end.

A bundle is pinned by a sliver of the resource that each node has by its address, which every version of Ray
keeps to, so a bundle's index is its rank and Ray's own order does not matter.
"""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_stack.config import env_vars
from rlhf_stack.placement.model import (
    ENGINES,
    Engines,
    FreeNode,
    Group,
    PlacementError,
    Plan,
    Request,
    chunks,
    largest,
)
from rlhf_stack.placement.planner import free_resources, lack, plan
from rlhf_stack.telemetry import events
from rlhf_stack.telemetry.logging import tell, warn

PIN = "node:"
SLIVER = 0.001  # of a node's own resource, and of a CPU for the actor that drives an engine
SETTLE_SECONDS = 10.0
POLL_SECONDS = 0.25
NOT_YET = "enough is free, but Ray has not yet acted"


def driver_cpus(gpus: float) -> float:
    """CPUs for an engine's driving actor that has ``gpus`` GPUs: never none.

    Ray 2.9.3 ignores the bundle of an actor without resources, and starts it on any node.
    """
    return gpus or SLIVER


def nodes_now() -> list[FreeNode]:
    """The living nodes with what is free on each, each with an address of its own.

    A machine that was started again is two nodes until Ray finds the old one dead: that is awaited, and a
    `PlacementError` if it is not so in time.
    """
    return _nodes(free=True)


def reserve(request: Request) -> dict[str, Any]:
    """Ray placement groups by name for all of ``request``, bundles in rank order, each on its planned node.

    Engines that are apart are a list of groups. `PlacementError`, before anything is started and with nothing
    left reserved, says why there is no place.
    """
    import ray

    if not ray.is_initialized():  # OpenRLHF 0.5.1 leaves it to what it uses first of Ray
        ray.init()
    apart = bool(request.engines and request.engines.apart)
    end = time.monotonic() + env_vars.placement_timeout()
    while True:
        nodes, found = _plan_on_free(request)
        _tell(nodes, request, found)
        made = _groups(nodes, found, apart)
        try:
            placed = _have_places(made, end)
        except PlacementError:
            _remove(made)
            raise
        if placed:
            break
        _remove(made)
        tell("placement: what the plan took for free is taken; planning again")
    if apart:
        made[ENGINES] = [made.pop(f"engine {index}") for index in range(len(found.engines))]
    return made


def reserve_engines(count: int, size: int, apart: bool = False) -> Any:
    """A placement group for ``count`` engines of ``size`` GPUs and nothing else; ``apart``: one for each."""
    return reserve(Request(engines=Engines(count, size, apart=apart)))[ENGINES]


def wait(group: Any, what: str) -> None:
    """Until ``group`` has its resources; `PlacementError` after the deadline says what it lacks."""
    _wait(group, what, env_vars.placement_timeout())


def rank_bundles(group: Any) -> list[int]:
    """The bundle of each rank, so that ranks that follow each other share nodes as far as possible.

    A bundle of several GPUs has as many ranks.
    """
    if _is_pinned(group):
        return list(range(group.bundle_count))
    order = [bundle for bundles in by_node(_bundle_nodes(group)).values() for bundle in bundles]
    return [bundle for bundle in order for _ in range(_gpus(group.bundle_specs[bundle]))]


def engine_bundles(group: Any, index: int, size: int) -> list[int]:
    """The bundles of engine ``index``; `PlacementError` if it straddles in a group that nobody planned."""
    if _is_pinned(group):
        return list(range(index * size, (index + 1) * size))
    nodes = _bundle_nodes(group)
    found = cut(nodes, size)[index]
    if len({nodes[bundle] for bundle in found}) > 1 and size <= largest(_nodes(free=False)):
        text = f"engine {index} of {size} GPUs straddles nodes: no node has {size} bundles left of its group"
        if not env_vars.flag(env_vars.ALLOW_STRADDLE):
            raise PlacementError(f"{text}; {env_vars.ALLOW_STRADDLE}=1 allows it, which is slow")
        warn(text)
    return found


def by_node(nodes: Sequence[str]) -> dict[str, list[int]]:
    """Bundle indices by node, nodes in the order in which they first come."""
    found: dict[str, list[int]] = {}
    for bundle, node in enumerate(nodes):
        found.setdefault(node, []).append(bundle)
    return found


def cut(nodes: Sequence[str], size: int) -> list[list[int]]:
    """Bundle indices of engines of ``size`` bundles, given the node of each bundle: whole ones come first."""
    natural = [list(bundles) for bundles in chunks(range(len(nodes)), size)]
    if all(len({nodes[bundle] for bundle in bundles}) == 1 for bundles in natural):
        return natural
    whole, rest = [], []
    for bundles in by_node(nodes).values():
        end = len(bundles) // size * size
        whole += [list(engine) for engine in chunks(bundles[:end], size)]
        rest += bundles[end:]
    return whole + [list(engine) for engine in chunks(rest, size)]


def unplaced(nodes: Sequence[FreeNode], bundles: Sequence[Mapping[str, float]]) -> str:
    """What ``bundles`` of as many CPUs as GPUs lack on ``nodes``; pinned ones on their own node."""
    pins = Counter(key.removeprefix(PIN) for bundle in bundles for key in bundle if key.startswith(PIN))
    if not pins:
        gpus = [_gpus(bundle) for bundle in bundles]
        if missing := lack(nodes, Request((Group("all", 1, sum(gpus)),))):
            return missing
        able = sum(node.bundles >= max(gpus) for node in nodes)
        if max(gpus) > 1 and able < len(gpus):
            return (
                f"{len(gpus)} nodes with {max(gpus)} GPUs and CPUs each are asked for, {able} have them free"
            )
        return NOT_YET
    there = {node.address: node for node in nodes}
    lacks = []
    for address, wanted in pins.items():
        node = there.get(address)
        if node is None:
            lacks.append(f"node {address} has gone")
        elif node.gpus < wanted:
            lacks.append(f"GPU is missing on {address}: {wanted} needed, {node.gpus:g} free")
        elif node.cpus < wanted:
            lacks.append(f"CPU is missing on {address}: {wanted} needed, {node.cpus:g} free")
    return "; ".join(lacks) or NOT_YET


def _nodes(free: bool) -> list[FreeNode]:
    end = time.monotonic() + env_vars.placement_timeout()
    warned = False
    while twice := _repeated(found := _living(free)):
        if time.monotonic() > end:
            raise PlacementError(
                f"Ray nodes must have addresses of their own, and several have {', '.join(twice)} "
                f"(waited {env_vars.placement_timeout():.0f} s, {env_vars.PLACEMENT_TIMEOUT}): "
                "start each with ray start --node-ip-address"
            )
        if not warned:
            warn(f"Ray has two nodes at {', '.join(twice)}: waiting until it finds the old one dead")
            warned = True
        time.sleep(POLL_SECONDS)
    return sorted(found, key=lambda node: [part.zfill(3) for part in node.address.split(".")])


def _living(free: bool) -> list[FreeNode]:
    """What Ray has, in its order."""
    import ray
    from ray._private import state

    per_node = getattr(state, "available_resources_per_node", None)
    if per_node is None:  # Ray 2.9.3
        per_node = state.state._available_resources_per_node
    available = per_node()
    found = []
    for entry in ray.nodes():
        if entry["Alive"]:
            total = entry["Resources"]
            left = available.get(entry["NodeID"], total) if free else total
            found.append(
                FreeNode(
                    entry["NodeManagerAddress"],
                    left.get("GPU", 0.0),
                    left.get("CPU", 0.0),
                    total.get("GPU", 0.0),
                )
            )
    return found


def _repeated(nodes: Sequence[FreeNode]) -> list[str]:
    """The addresses that several of ``nodes`` have."""
    return [address for address, count in Counter(node.address for node in nodes).items() if count > 1]


def _plan_on_free(request: Request) -> tuple[list[FreeNode], Plan]:
    """A plan on what is free; what a job that has just ended still holds is awaited for a moment."""
    allow = env_vars.flag(env_vars.ALLOW_STRADDLE)
    end = time.monotonic() + SETTLE_SECONDS
    while True:
        nodes = _nodes(free=True)
        try:
            return nodes, plan(nodes, request, allow)
        except PlacementError:
            plan(_nodes(free=False), request, allow)
            if time.monotonic() > end:
                raise
        time.sleep(POLL_SECONDS)


def _tell(nodes: Sequence[FreeNode], request: Request, found: Plan) -> None:
    for name, bundles in found.bundles.items():
        tell(f"placement: {name}: {_counts(nodes, bundles)}")
    for index, bundles in enumerate(found.engines):
        text = f"engine {index}: {_counts(nodes, bundles)}"
        if index in found.straddling:
            warn(f"{text}: it straddles nodes, and is slow ({env_vars.ALLOW_STRADDLE}=1)")
        else:
            tell(f"placement: {text}")
    if request.block <= largest(nodes):
        for name, count in found.split.items():
            warn(
                f"{count} of the blocks of {request.block} ranks of {name} (tensor parallelism times ring "
                "attention) lie across nodes, and are slow: no node has room for them"
            )
    events.emit(
        "placement",
        groups={name: [nodes[node].address for node in bundles] for name, bundles in found.bundles.items()},
        engines=[[nodes[node].address for node in bundles] for bundles in found.engines],
        straddling=list(found.straddling),
    )


def _counts(nodes: Sequence[FreeNode], bundles: Sequence[int]) -> str:
    counts = Counter(bundles)
    return ", ".join(f"{count} on {nodes[node].address}" for node, count in counts.items())


def _groups(nodes: Sequence[FreeNode], found: Plan, apart: bool) -> dict[str, Any]:
    """Placement groups by name, for Ray to place; each engine has its own where they are ``apart``."""
    import ray

    bundles_by_name = {name: bundles for name, bundles in found.bundles.items() if bundles}
    if apart:
        del bundles_by_name[ENGINES]
        bundles_by_name |= {f"engine {index}": bundles for index, bundles in enumerate(found.engines)}
    made = {}
    for name, bundles in bundles_by_name.items():
        pinned = [{"GPU": 1, "CPU": 1, PIN + nodes[node].address: SLIVER} for node in bundles]
        made[name] = ray.util.placement_group(pinned, strategy="PACK")
    return made


def _have_places(made: Mapping[str, Any], end: float) -> bool:
    """Whether all groups have their places; not, if Ray's view of what is free was late and they are taken.

    `PlacementError` at ``end``, by `time.monotonic`.
    """
    for name, group in made.items():
        left = end - time.monotonic()
        if left > SETTLE_SECONDS and not group.wait(math.ceil(SETTLE_SECONDS)):
            if unplaced(_nodes(free=True), group.bundle_specs) != NOT_YET:
                return False
            left = end - time.monotonic()
        _wait(group, name, max(1.0, left))
    return True


def _remove(made: Mapping[str, Any]) -> None:
    import ray

    for group in made.values():
        ray.util.remove_placement_group(group)


def _wait(group: Any, what: str, seconds: float) -> None:
    import ray

    start = time.monotonic()
    if group.wait(math.ceil(seconds)):
        return
    stats = ray.util.placement_group_table(group).get("stats", {})
    nodes = _nodes(free=True)
    ray.util.remove_placement_group(group)
    raise PlacementError(
        f"the placement group of {what} ({group.bundle_count} bundles for "
        f"{sum(_gpus(bundle) for bundle in group.bundle_specs)} GPUs and as many CPUs) has no place after "
        f"{time.monotonic() - start:.0f} s ({env_vars.PLACEMENT_TIMEOUT}); Ray says "
        f"{stats.get('scheduling_state', 'nothing')}: {unplaced(nodes, group.bundle_specs)}\n"
        f"  free: {free_resources(nodes)}"
    )


def _gpus(bundle: Mapping[str, float]) -> int:
    """The GPUs of a bundle."""
    return int(bundle["GPU"])


def _is_pinned(group: Any) -> bool:
    """Whether `reserve` made ``group``, whose bundles are in rank order."""
    return any(key.startswith(PIN) for key in group.bundle_specs[0])


def _bundle_nodes(group: Any) -> list[str]:
    """The id of the node of each bundle."""
    import ray

    table = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return [table[bundle] for bundle in range(len(table))]
