"""The planner compared with exhaustive search on thousands of random small clusters."""

import itertools
from collections import Counter
from collections.abc import Iterator

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rlhf_stack.placement.model import (
    ENGINES,
    Engines,
    FreeNode,
    Group,
    PlacementError,
    Plan,
    Request,
    chunks,
)
from rlhf_stack.placement.planner import nearest_requests, plan

NODES = st.lists(
    st.builds(
        FreeNode, address=st.just("n"), gpus=st.integers(0, 8), cpus=st.integers(0, 9), total_gpus=st.just(8)
    ),
    min_size=1,
    max_size=4,
)


@st.composite
def separate(draw: st.DrawFn) -> Request:
    block = draw(st.integers(1, 6))
    sizes = draw(st.lists(st.integers(1, 3), max_size=3))
    groups = tuple(Group(f"g{index}", blocks, block) for index, blocks in enumerate(sizes))
    return Request(groups, Engines(draw(st.integers(1, 5)), draw(st.integers(1, 8))), block)


@st.composite
def shared(draw: st.DrawFn) -> Request:
    count, size, block = draw(st.integers(1, 5)), draw(st.integers(1, 6)), draw(st.sampled_from([1, 2, 4]))
    others = draw(st.lists(st.integers(1, 2), max_size=1))
    groups = tuple(Group(f"g{index}", blocks, block) for index, blocks in enumerate(others))
    return Request((Group("actor", count, size), *groups), Engines(count, size, "actor"), block)


def engine_counts(free: list[int], engines: Engines) -> Iterator[tuple[int, ...]]:
    """Yield every number of node-local engines by node."""
    rooms = [range(bundles // engines.size + 1) for bundles in free]
    return (counts for counts in itertools.product(*rooms) if sum(counts) == engines.count)


def most_blocks(free: list[int], request: Request) -> int | None:
    """Return the most blocks that fit next to all engines, None if the engines do not fit."""
    assert request.engines is not None
    rooms = [
        sum(
            (bundles - engines * request.engines.size) // request.tp_sp_size
            for bundles, engines in zip(free, counts, strict=True)
        )
        for counts in engine_counts(free, request.engines)
    ]
    return max(rooms) if rooms else None


def attempt(nodes: list[FreeNode], request: Request, allow_straddle: bool = False) -> Plan | None:
    try:
        return plan(nodes, request, allow_straddle)
    except PlacementError:
        return None


def check(nodes: list[FreeNode], request: Request, found: Plan) -> None:
    """Assert that everything is placed once and no node exceeds its capacity."""
    engines = request.engines
    assert engines is not None
    names = {group.name for group in request.groups} | (set() if engines.shares else {ENGINES})
    assert set(found.bundles) == names
    for group in request.groups:
        assert len(found.bundles[group.name]) == group.size
    used = Counter(node for nodes_of in found.bundles.values() for node in nodes_of)
    assert all(count <= nodes[node].bundles for node, count in used.items())
    own = found.bundles[engines.shares or ENGINES][: engines.count * engines.size]
    assert list(found.engines) == chunks(own, engines.size)
    straddling = tuple(index for index, of in enumerate(found.engines) if len(set(of)) > 1)
    assert found.straddling == straddling
    for name, nodes_of in found.bundles.items():
        if name != ENGINES:
            across = sum(len(set(block)) > 1 for block in chunks(nodes_of, request.tp_sp_size))
            assert found.split.get(name, 0) == across


@settings(max_examples=1500, deadline=None)
@given(NODES, separate())
def test_separate_engines_never_straddle_and_most_blocks_stay_whole(
    nodes: list[FreeNode], request: Request
) -> None:
    free = [node.bundles for node in nodes]
    found = attempt(nodes, request)
    blocks = most_blocks(free, request)
    if blocks is None or sum(free) < request.size:
        assert found is None
        return
    assert found is not None
    check(nodes, request, found)
    assert found.straddling == ()
    wanted = sum(group.size // request.tp_sp_size for group in request.groups)
    assert wanted - sum(found.split.values()) == min(wanted, blocks)


@settings(max_examples=1000, deadline=None)
@given(NODES, shared())
def test_colocated_engines_never_straddle(nodes: list[FreeNode], request: Request) -> None:
    assert request.engines is not None
    free = [node.bundles for node in nodes]
    found = attempt(nodes, request)
    possible = any(True for _ in engine_counts(free, request.engines)) and sum(free) >= request.size
    assert (found is not None) == possible
    if found is not None:
        check(nodes, request, found)
        assert found.straddling == ()


@settings(max_examples=1000, deadline=None)
@given(NODES, st.one_of(separate(), shared()))
def test_allowed_straddling_is_minimal(nodes: list[FreeNode], request: Request) -> None:
    assert request.engines is not None
    free = [node.bundles for node in nodes]
    found = attempt(nodes, request, allow_straddle=True)
    assert (found is not None) == (sum(free) >= request.size)
    if found is not None:
        check(nodes, request, found)
        whole = max(
            count
            for count in range(request.engines.count + 1)
            if any(True for _ in engine_counts(free, Engines(count, request.engines.size)))
        )
        assert len(found.straddling) == request.engines.count - whole


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(2, 9), st.integers(1, 3))
def test_engines_larger_than_a_node_take_the_fewest_nodes(
    nodes: int, per_node: int, size: int, count: int
) -> None:
    assume(size > per_node and count * size <= nodes * per_node)
    cluster = [FreeNode("n", per_node, per_node, per_node) for _ in range(nodes)]
    request = Request(engines=Engines(count, size))
    found = attempt(cluster, request)
    assert found is not None
    whole = [Counter(of) for of in found.engines]
    for taken in whole:
        assert sum(used < per_node for used in taken.values()) <= 1 or size % per_node
    if size % per_node == 0:
        assert all(len(taken) == size // per_node for taken in whole)
    assert len(whole[0]) == -(-size // per_node)


@settings(max_examples=300, deadline=None)
@given(NODES, st.one_of(separate(), shared()))
def test_suggested_requests_fit(nodes: list[FreeNode], request: Request) -> None:
    for other in nearest_requests(nodes, request):
        assert other != request
        assert attempt(nodes, other) is not None
