"""rlhf_stack.planning.upstream_placement_flat: predictions against measured layouts."""

import pytest
from rlhf_stack.placement.model import ENGINES, Engines, FreeNode, Group, Request
from rlhf_stack.planning.upstream_placement_flat import upstream_layout_flat


def nodes(*gpus: int) -> list[FreeNode]:
    return [FreeNode(f"n{index}", free, 64, 8) for index, free in enumerate(gpus)]


@pytest.mark.parametrize(
    ("free", "size", "count", "straddling"),
    [((8, 8), 4, 4, 0), ((6, 6), 4, 3, 1), ((5, 5), 2, 5, 1), ((4, 4), 8, 1, 1), ((4, 6), 4, 2, 0)],
)
def test_each_engine_has_a_group_of_its_own(
    free: tuple[int, ...], size: int, count: int, straddling: int
) -> None:
    """The placement was measured with Ray 2.9.3 and 2.12.0."""
    found = upstream_layout_flat(nodes(*free), Request(engines=Engines(count, size)))
    assert len(found.engines) == count
    assert len(found.straddling) == straddling


def test_groups_take_whole_nodes_apart_from_each_other() -> None:
    """Two colocated pairs of two GPUs leave 6 and 6, and one of three engines of four straddles."""
    request = Request((Group("actor", 1, 2), Group("critic", 1, 2)), Engines(3, 4))
    found = upstream_layout_flat(nodes(8, 8), request)
    assert found.bundles == {"actor": (0, 0), "critic": (1, 1)}
    assert found.straddling == (2,)


def test_ranks_of_a_group_follow_its_nodes() -> None:
    found = upstream_layout_flat(nodes(8, 8), Request((Group("actor", 2, 4),)))
    assert found.bundles == {"actor": (0, 0, 0, 0, 1, 1, 1, 1)}


def test_a_node_with_too_few_free_gpus_leaves_the_group_pending() -> None:
    found = upstream_layout_flat(nodes(4, 4), Request((Group("actor", 1, 8),), Engines(1, 1)))
    assert found.pending == "actor"
    assert found.engines == ()


def test_engines_that_do_not_fit_are_pending() -> None:
    found = upstream_layout_flat(nodes(2), Request((Group("actor", 1, 1),), Engines(2, 1)))
    assert found.pending == ENGINES
    assert found.engines == ((0,),)
