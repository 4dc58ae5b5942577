"""Predicted placements of pristine OpenRLHF; the layouts were measured on Ray 2.9.3, 2.12.0 and 2.55.0.

``tests/cluster/test_placement_order.py`` compares with the Ray of each image.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlhf_stack.placement.model import ENGINES, Engines, FreeNode, Group, Request
from rlhf_stack.planning.upstream_placement import pack, std_sort_order, upstream_layout

MEASURED = {
    (8, 8): "AAAAAAAABBBBBBBB",
    (8, 8, 8): "ABBBBBBBBAAACAAAACCCCCCC",
    (8, 8, 8, 8): "ABBBBBBBBAAAAAAACDDDDDDDDCCCCCCC",
    (8,) * 8: "ABBBBBBBCCCCCCCCBAAAAAAADDDDDDDDEFFFFFFFGGGGGGGGFEEEEEEEHHHHHHHH",
    (6, 6): "AAAAAABBBBBB",
    (5, 7): "AAAAAAABBBBB",
    (6, 6, 6): "ABBBBBBAACAAACCCCC",
    (7, 7, 7, 7): "ABBBBBBBAAAAAACDDDDDDDCCCCCC",
    (6, 6, 8, 4): "ABBBBCCCCCCADAAAADDDDDDD",
    (3, 8, 5, 8): "ABBBCCCCCAAADAAAADDDDDDD",
}


def cluster(*gpus: int, cpus: int = 64) -> list[FreeNode]:
    return [FreeNode(str(index), free, cpus, 8) for index, free in enumerate(gpus)]


def letters(nodes: tuple[int, ...]) -> str:
    """Nodes as letters, in the order in which they first come."""
    names = {node: chr(ord("A") + index) for index, node in enumerate(dict.fromkeys(nodes))}
    return "".join(names[node] for node in nodes)


@pytest.mark.parametrize(("gpus", "expected"), MEASURED.items(), ids=str)
def test_the_layouts_that_were_measured(gpus: tuple[int, ...], expected: str) -> None:
    placed = pack(cluster(*gpus), sum(gpus))
    assert placed is not None
    assert letters(placed) == expected


@given(st.integers(0, 400))
def test_equal_bundles_are_permuted_above_sixteen_only(count: int) -> None:
    order = std_sort_order(count)
    assert sorted(order) == list(range(count))
    assert (order == list(range(count))) == (count <= 16)


def test_cpu_poor_nodes_are_passed_over_though_an_engine_would_fit() -> None:
    """Measured: free GPUs 3 and 8 with free CPUs 64 and 4 make PACK take 1 and 3."""
    nodes = [FreeNode("a", 3, 64, 8), FreeNode("b", 8, 4, 8)]
    placed = pack(nodes, 4)
    assert placed is not None
    assert sorted(placed) == [0, 0, 0, 1]


def test_what_does_not_fit_is_pending() -> None:
    assert pack(cluster(8, cpus=4), 8) is None
    found = upstream_layout(cluster(8, cpus=4), Request((Group("actor", 1, 8),)), ["actor"])
    assert (found.pending, found.bundles) == ("actor", {})


@pytest.mark.parametrize(
    ("gpus", "engines", "straddling"),
    [((6, 6, 6), Engines(3, 4), (1,)), ((6, 6, 4), Engines(4, 4), (1,)), ((8, 8, 6), Engines(4, 4), ())],
)
def test_engines_straddle_where_a_nodes_bundles_are_no_multiple(
    gpus: tuple[int, ...], engines: Engines, straddling: tuple[int, ...]
) -> None:
    assert upstream_layout(cluster(*gpus), Request(engines=engines), [ENGINES]).straddling == straddling


def test_what_was_placed_before_is_taken() -> None:
    request = Request((Group("actor", 1, 2), Group("critic", 1, 2)), Engines(3, 4))
    found = upstream_layout(cluster(8, 8), request, ["actor", "critic", ENGINES])
    assert set(found.bundles["actor"]) != set(found.bundles["critic"])
    assert len(found.straddling) == 1


def test_engines_share_the_trainers_bundles() -> None:
    request = Request((Group("actor", 4, 8),), Engines(8, 4, "actor"))
    found = upstream_layout(cluster(8, 8, 8, 8), request, ["actor"])
    assert found.straddling == ()
    assert letters(found.bundles["actor"]) == MEASURED[8, 8, 8, 8]
