"""Groups on distinct nodes, compared with exhaustive search on random small clusters."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_stack.placement.model import Engines, FreeNode, Group, PlacementError, Request
from rlhf_stack.placement.planner import plan


def cluster(free: Sequence[int]) -> list[FreeNode]:
    return [FreeNode(f"n{index}", gpus, gpus, 8) for index, gpus in enumerate(free)]


def placements(free: list[int], groups: Sequence[Group]) -> Iterator[list[int]]:
    """Yield the free bundles by node after every possible placement."""
    if not groups:
        yield free
        return
    for nodes in itertools.combinations(range(len(free)), groups[0].nodes):
        left = [room - groups[0].gpus_per_node * (node in nodes) for node, room in enumerate(free)]
        if min(left) >= 0:
            yield from placements(left, groups[1:])


GROUPS = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5)), min_size=1, max_size=3).map(
    lambda sizes: tuple(
        Group(f"g{i}", nodes, gpus, strict_spread=True) for i, (nodes, gpus) in enumerate(sizes)
    )
)


@settings(max_examples=2000, deadline=None)
@given(st.lists(st.integers(0, 8), min_size=1, max_size=4), GROUPS, st.integers(1, 5), st.integers(1, 8))
def test_no_engine_straddles_if_any_placement_of_the_groups_leaves_room(
    free: list[int], groups: tuple[Group, ...], count: int, size: int
) -> None:
    most = max((sum(left // size for left in rest) for rest in placements(free, groups)), default=None)
    try:
        found = plan(cluster(free), Request(groups, Engines(count, size)))
    except PlacementError:
        assert most is None or most < count or sum(free) < count * size
        return
    assert most is not None
    assert most >= count
    used = Counter(node for nodes in found.bundles.values() for node in nodes)
    assert all(taken <= free[node] for node, taken in used.items())
    assert found.straddling == ()
    for group in groups:
        there = Counter(found.bundles[group.name])
        assert list(there.values()) == [group.gpus_per_node] * group.nodes
        assert list(found.bundles[group.name]) == sorted(found.bundles[group.name]), "ranks follow nodes"


def test_two_pairs_are_packed_so_that_three_engines_fit() -> None:
    pairs = Group("actor", 1, 2, strict_spread=True), Group("critic", 1, 2, strict_spread=True)
    found = plan(cluster([8, 8]), Request(pairs, Engines(3, 4)))
    assert found.bundles["actor"] == found.bundles["critic"]


def test_search_is_used_if_the_greedy_choice_is_not_optimal() -> None:
    """The greedy choice leaves room for three of 4 engines."""
    free = [8, 6, 5, 7]
    groups = tuple(Group(name, 2, gpus, strict_spread=True) for name, gpus in (("a", 2), ("b", 2), ("c", 1)))
    assert plan(cluster(free), Request(groups, Engines(4, 4))).straddling == ()


def test_too_few_nodes_are_an_error_that_names_the_groups() -> None:
    with pytest.raises(PlacementError, match="actor needs 2 nodes with 4 each"):
        plan(cluster([8, 3]), Request((Group("actor", 2, 4, strict_spread=True),)))


@pytest.mark.timeout(60)
def test_the_time_for_a_large_cluster_does_not_grow_with_its_square() -> None:
    groups = tuple(Group(name, 64, 4, strict_spread=True) for name in ("actor", "critic"))
    found = plan(cluster([8] * 100_000), Request(groups, Engines(99_900, 8)))
    assert len(set(found.bundles["actor"])) == 64
