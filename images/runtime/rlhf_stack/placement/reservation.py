"""Reservation of a plan in Ray: free resources, placement groups pinned to nodes, and waits with a deadline.

A bundle is pinned by a sliver of the resource that each node has for its address, which every version of Ray
respects. A bundle's index is therefore its rank, whatever order Ray uses.
"""

import math
import os
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rlhf_stack.compat import ray_private
from rlhf_stack.config import env_vars
from rlhf_stack.lazy import ray
from rlhf_stack.placement.demand import Demand
from rlhf_stack.placement.model import (
    ENGINES,
    Engines,
    FreeNode,
    Group,
    PlacementError,
    Plan,
    Request,
    chunks,
    largest_node,
)
from rlhf_stack.placement.planner import describe_free, describe_shortage, plan
from rlhf_stack.telemetry import events, run_log

PIN = "node:"
SLIVER = 0.001  # of a node's own resource, and of a CPU for the actor that drives an engine
SETTLE_SECONDS = 10.0
POLL_SECONDS = 0.25
NOT_YET = "enough is free, but Ray has not placed it yet"


def driver_cpus(gpus: float) -> float:
    """Return the CPUs of an engine actor that has ``gpus`` GPUs: always more than zero.

    Ray 2.9.3 ignores the bundle of an actor without resources and starts it on any node.
    """
    return gpus or SLIVER


def free_nodes(environment: Mapping[str, str] = os.environ) -> list[FreeNode]:
    """Return the live nodes that ``environment`` does not exclude, with their free resources.

    Each has a distinct address. A restarted machine is listed twice until Ray finds the old node dead. This
    waits for it, and raises `PlacementError` at the deadline.
    """
    return _nodes(True, environment)


def reserve(request: Request, wait: bool = True, avoid: Collection[str] = ()) -> dict[str, Any]:
    """Reserve ``request``; return Ray placement groups by name, with bundles in rank order on planned nodes.

    Engines with GPUs of their own have a group each, in a list: the place of a lost one can be released, and
    vLLM 0.4 uses all bundles of its group. Raises `PlacementError` if there is no placement; nothing has been
    started then, and nothing stays reserved. Without ``wait`` only what is free now counts. Nothing is placed
    on the nodes whose addresses are in ``avoid``.
    """
    if not ray.is_initialized():  # OpenRLHF 0.5.1 relies on the implicit initialization
        ray.init()
    end = time.monotonic() + env_vars.placement_timeout()
    while True:
        nodes, found = _plan_on_free(request, end if wait else 0.0, avoid)
        _log_plan(nodes, request, found)
        groups = _create_groups(nodes, found)
        try:
            placed = _wait_for_groups(groups, end)
        except PlacementError:
            _remove(groups)
            raise
        if placed:
            break
        _remove(groups)
        run_log.info("placement: resources that were free in the plan are taken; planning again")
    if ENGINES in found.bundles:
        groups[ENGINES] = [groups.pop(f"engine {index}") for index in range(len(found.engines))]
    return groups


def reserve_engines(count: int, size: int, wait: bool = True, avoid: Collection[str] = ()) -> list[Any]:
    """Reserve a placement group for each of ``count`` engines of ``size`` GPUs; see `reserve`."""
    groups: list[Any] = reserve(Request(engines=Engines(count, size)), wait, avoid)[ENGINES]
    return groups


def release(group: str) -> None:
    """Release the placement group with hexadecimal id ``group``; Ray ends what still runs in it."""
    from ray.util.placement_group import PlacementGroup

    ray.util.remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group))))


def pinned_addresses(group: Any, bundles: Sequence[int]) -> list[str]:
    """Return the addresses of the nodes to which ``bundles`` of ``group`` are pinned."""
    return [
        key.removeprefix(PIN)
        for bundle in bundles
        for key in group.bundle_specs[bundle]
        if key.startswith(PIN)
    ]


def wait_for_placement_group(group: Any, what: str) -> None:
    """Wait until ``group`` has its resources; `PlacementError` after the deadline names what is missing."""
    _wait(group, what, env_vars.placement_timeout())


def rank_bundles(group: Any) -> list[int]:
    """Return the bundle of each rank, such that consecutive ranks share nodes as far as possible.

    A bundle of several GPUs holds one rank per GPU.
    """
    if _is_pinned(group):
        return list(range(group.bundle_count))
    order = [bundle for bundles in bundles_by_node(_bundle_nodes(group)).values() for bundle in bundles]
    return [bundle for bundle in order for _ in range(_gpus(group.bundle_specs[bundle]))]


def engine_place(groups: Any, index: int, size: int) -> tuple[Any, list[int]]:
    """Return the placement group of engine ``index`` and the bundles in it that are the engine's.

    ``groups`` is a list with one for each engine, or the group whose GPUs all engines share.
    """
    if isinstance(groups, list):
        return groups[index], list(range(size))
    return groups, engine_bundles(groups, index, size)


def engine_bundles(group: Any, index: int, size: int) -> list[int]:
    """Return the bundles of engine ``index``; `PlacementError` if it straddles in a group without a plan."""
    if _is_pinned(group):
        return list(range(index * size, (index + 1) * size))
    nodes = _bundle_nodes(group)
    found = engine_chunks(nodes, size)[index]
    if len({nodes[bundle] for bundle in found}) > 1 and size <= largest_node(_nodes(free=False)):
        text = f"engine {index} of {size} GPUs straddles nodes: no node has {size} free bundles of its group"
        if not env_vars.flag(env_vars.ALLOW_STRADDLE):
            raise PlacementError(f"{text}; {env_vars.ALLOW_STRADDLE}=1 allows it, which is slow")
        run_log.warning(text)
    return found


def bundles_by_node(nodes: Sequence[str]) -> dict[str, list[int]]:
    """Return bundle indices by node, nodes in order of first appearance."""
    found: dict[str, list[int]] = {}
    for bundle, node in enumerate(nodes):
        found.setdefault(node, []).append(bundle)
    return found


def engine_chunks(nodes: Sequence[str], size: int) -> list[list[int]]:
    """Return the bundle indices of each engine of ``size`` bundles, node-local engines first."""
    natural = [list(bundles) for bundles in chunks(range(len(nodes)), size)]
    if all(len({nodes[bundle] for bundle in bundles}) == 1 for bundles in natural):
        return natural
    whole, rest = [], []
    for bundles in bundles_by_node(nodes).values():
        end = len(bundles) // size * size
        whole += [list(engine) for engine in chunks(bundles[:end], size)]
        rest += bundles[end:]
    return whole + [list(engine) for engine in chunks(rest, size)]


def describe_unplaced(nodes: Sequence[FreeNode], bundles: Sequence[Mapping[str, float]]) -> str:
    """Describe what ``bundles`` (with as many CPUs as GPUs) lack on ``nodes``, pinned ones on their node."""
    pins = Counter(key.removeprefix(PIN) for bundle in bundles for key in bundle if key.startswith(PIN))
    if not pins:
        gpus = [_gpus(bundle) for bundle in bundles]
        if missing := describe_shortage(nodes, Request((Group("all", 1, sum(gpus)),))):
            return missing
        able = sum(node.bundles >= max(gpus) for node in nodes)
        if max(gpus) > 1 and able < len(gpus):
            return (
                f"{len(gpus)} nodes with {max(gpus)} GPUs and CPUs each are requested, {able} have them free"
            )
        return NOT_YET
    by_address = {node.address: node for node in nodes}
    missing_on_pins = []
    for address, wanted in pins.items():
        node = by_address.get(address)
        if node is None:
            missing_on_pins.append(f"node {address} is gone")
        elif node.gpus < wanted:
            missing_on_pins.append(f"GPU is missing on {address}: {wanted} needed, {node.gpus:g} free")
        elif node.cpus < wanted:
            missing_on_pins.append(f"CPU is missing on {address}: {wanted} needed, {node.cpus:g} free")
    return "; ".join(missing_on_pins) or NOT_YET


def _nodes(free: bool, environment: Mapping[str, str] = os.environ) -> list[FreeNode]:
    end = time.monotonic() + env_vars.placement_timeout()
    excluded = env_vars.excluded_nodes(environment)
    warned = False
    while repeated := _repeated(
        found := [node for node in _live_nodes(free) if node.address not in excluded]
    ):
        if time.monotonic() > end:
            raise PlacementError(
                f"Ray nodes must have distinct addresses, and several have {', '.join(repeated)} "
                f"(waited {env_vars.placement_timeout():.0f} s, {env_vars.PLACEMENT_TIMEOUT}): "
                "start each with ray start --node-ip-address"
            )
        if not warned:
            run_log.warning(
                f"Ray lists two nodes at {', '.join(repeated)}: waiting until the old one is dead"
            )
            warned = True
        time.sleep(POLL_SECONDS)
    return sorted(found, key=lambda node: [part.zfill(3) for part in node.address.split(".")])


def _live_nodes(free: bool) -> list[FreeNode]:
    """Return the live nodes in Ray's order."""
    available = ray_private.available_resources_per_node()
    found = []
    for entry in ray.nodes():
        if entry["Alive"]:
            total = entry["Resources"]
            resources = available.get(entry["NodeID"], total) if free else total
            found.append(
                FreeNode(
                    entry["NodeManagerAddress"],
                    resources.get("GPU", 0.0),
                    resources.get("CPU", 0.0),
                    total.get("GPU", 0.0),
                )
            )
    return found


def _repeated(nodes: Sequence[FreeNode]) -> list[str]:
    """Return the addresses that several of ``nodes`` share."""
    return [address for address, count in Counter(node.address for node in nodes).items() if count > 1]


def _plan_on_free(request: Request, end: float, avoid: Collection[str]) -> tuple[list[FreeNode], Plan]:
    """Plan on free resources; wait until ``end`` for those in use, and for new nodes if that is allowed."""

    def usable(free: bool) -> list[FreeNode]:
        return [node for node in _nodes(free) if node.address not in avoid]

    allow = env_vars.flag(env_vars.ALLOW_STRADDLE)
    logged = False
    with Demand(request) as demand:
        while True:
            nodes = usable(free=True)
            try:
                return nodes, plan(nodes, request, allow)
            except PlacementError:
                if time.monotonic() > end:
                    raise
            try:
                plan(usable(free=False), request, allow)
            except PlacementError:
                if not env_vars.flag(env_vars.AUTOSCALE):
                    raise
                demand.request_nodes()
            else:
                demand.withdraw()
                if not logged:
                    run_log.info(f"placement: waiting for GPUs in use ({env_vars.PLACEMENT_TIMEOUT})")
                logged = True
            time.sleep(POLL_SECONDS)


def _log_plan(nodes: Sequence[FreeNode], request: Request, found: Plan) -> None:
    for name, bundles in found.bundles.items():
        run_log.info(f"placement: {name}: {_counts(nodes, bundles)}")
    for index, bundles in enumerate(found.engines):
        text = f"engine {index}: {_counts(nodes, bundles)}"
        if index in found.straddling:
            run_log.warning(f"{text}: it straddles nodes, which is slow ({env_vars.ALLOW_STRADDLE}=1)")
        else:
            run_log.info(f"placement: {text}")
    if request.tp_sp_size <= largest_node(nodes):
        for name, count in found.split.items():
            run_log.warning(
                f"{count} blocks of {request.tp_sp_size} ranks of {name} (tensor parallelism times ring "
                "attention) span nodes, which is slow: no node has room for them"
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


def _create_groups(nodes: Sequence[FreeNode], found: Plan) -> dict[str, Any]:
    """Create placement groups by name, one for each engine with its own GPUs, without waiting for them."""
    bundles_by_name = {name: bundles for name, bundles in found.bundles.items() if bundles}
    if bundles_by_name.pop(ENGINES, ()):
        bundles_by_name |= {f"engine {index}": bundles for index, bundles in enumerate(found.engines)}
    groups = {}
    for name, bundles in bundles_by_name.items():
        pinned = [{"GPU": 1, "CPU": 1, PIN + nodes[node].address: SLIVER} for node in bundles]
        groups[name] = ray.util.placement_group(pinned, strategy="PACK")
    return groups


def _wait_for_groups(groups: Mapping[str, Any], end: float) -> bool:
    """Wait for all groups; return False if Ray's view of free resources was stale and they are taken.

    Raises `PlacementError` at ``end`` (of `time.monotonic`).
    """
    for name, group in groups.items():
        remaining = end - time.monotonic()
        if remaining > SETTLE_SECONDS and not group.wait(math.ceil(SETTLE_SECONDS)):
            if describe_unplaced(_nodes(free=True), group.bundle_specs) != NOT_YET:
                return False
            remaining = end - time.monotonic()
        _wait(group, name, max(1.0, remaining))
    return True


def _remove(groups: Mapping[str, Any]) -> None:
    for group in groups.values():
        ray.util.remove_placement_group(group)


def _wait(group: Any, what: str, seconds: float) -> None:
    start = time.monotonic()
    if group.wait(math.ceil(seconds)):
        return
    stats = ray.util.placement_group_table(group).get("stats", {})
    nodes = _nodes(free=True)
    ray.util.remove_placement_group(group)
    raise PlacementError(
        f"the placement group of {what} ({group.bundle_count} bundles for "
        f"{sum(_gpus(bundle) for bundle in group.bundle_specs)} GPUs and as many CPUs) was not placed after "
        f"{time.monotonic() - start:.0f} s ({env_vars.PLACEMENT_TIMEOUT}); Ray reports "
        f"{stats.get('scheduling_state', 'nothing')}: {describe_unplaced(nodes, group.bundle_specs)}\n"
        f"  free: {describe_free(nodes)}"
    )


def _gpus(bundle: Mapping[str, float]) -> int:
    """Return the GPUs of a bundle."""
    return int(bundle["GPU"])


def _is_pinned(group: Any) -> bool:
    """Report whether `reserve` created ``group``, whose bundles are in rank order."""
    return any(key.startswith(PIN) for key in group.bundle_specs[0])


def _bundle_nodes(group: Any) -> list[str]:
    """Return the node id of each bundle."""
    table = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return [table[bundle] for bundle in range(len(table))]
