"""Plans that upstream gets wrong, and the messages of placement errors."""

import pytest
from rlhf_stack.placement.model import ENGINES, Engines, FreeNode, Group, PlacementError, Request
from rlhf_stack.placement.planner import nearest_requests, plan


def cluster(*gpus: float, cpus: float = 64, total: float = 8) -> list[FreeNode]:
    return [FreeNode(f"10.0.0.{index + 1}", free, cpus, total) for index, free in enumerate(gpus)]


def test_three_nodes_of_six_hold_an_engine_each() -> None:
    """Upstream lets engine 1 straddle: see planning/test_upstream_placement.py."""
    found = plan(cluster(6, 6, 6), Request(engines=Engines(3, 4)))
    assert found.engines == ((0,) * 4, (1,) * 4, (2,) * 4)
    assert found.straddling == ()


def test_two_colocated_pairs_leave_room_for_three_engines() -> None:
    """Placed on the emptiest nodes, the pairs would leave 6 and 6 GPUs."""
    request = Request((Group("actor", 1, 2), Group("critic", 1, 2)), Engines(3, 4))
    found = plan(cluster(8, 8), request)
    assert [set(nodes) for nodes in found.engines] == [{0}, {0}, {1}]
    assert found.bundles["actor"] == found.bundles["critic"] == (1, 1)


def test_ranks_are_ordered_by_node_and_blocks_stay_whole() -> None:
    request = Request((Group("actor", 4, 8),), Engines(8, 4, "actor"), tp_sp_size=8)
    found = plan(cluster(8, 8, 8, 8), request)
    assert found.bundles == {"actor": tuple(node for node in range(4) for _ in range(8))}
    assert found.engines == tuple((engine // 2,) * 4 for engine in range(8))
    assert found.split == {}


def test_shared_gpus_leave_nodes_partly_free_to_avoid_straddling() -> None:
    found = plan(cluster(6, 6, 6), Request((Group("actor", 2, 6),), Engines(3, 4, "actor")))
    assert found.bundles["actor"] == (0,) * 4 + (1,) * 4 + (2,) * 4


def test_engine_larger_than_a_node_takes_whole_nodes() -> None:
    found = plan(cluster(8, 4, 8, 8, 8), Request((Group("actor", 1, 4),), Engines(2, 16)))
    assert [len(set(nodes)) for nodes in found.engines] == [2, 2]
    assert {node for nodes in found.engines for node in nodes} == {0, 2, 3, 4}
    assert found.bundles["actor"] == (1,) * 4
    assert found.straddling == ()


def test_group_takes_few_nodes() -> None:
    found = plan(cluster(8, 8, 4, 4), Request((Group("actor", 2, 4),), Engines(2, 4)))
    assert found.bundles["actor"] in {(0,) * 8, (1,) * 8}
    assert found.bundles[ENGINES] == (2,) * 4 + (3,) * 4


def test_head_without_gpus_is_not_used() -> None:
    found = plan(cluster(0, 2, 2), Request((Group("actor", 1, 2),), Engines(1, 2)))
    assert {0} & {*found.bundles["actor"], *found.bundles[ENGINES]} == set()


def test_split_blocks_are_counted() -> None:
    found = plan(cluster(3, 3), Request((Group("actor", 1, 6),), tp_sp_size=2))
    assert found.split == {"actor": 1}
    assert sorted(found.bundles["actor"]) == [0, 0, 0, 1, 1, 1]


def test_error_shows_the_nodes_the_request_and_what_would_fit() -> None:
    with pytest.raises(PlacementError) as refusal:
        plan(cluster(6, 6, 4), Request((Group("ref", 1, 1),), Engines(3, 5)))
    assert str(refusal.value).splitlines() == [
        "cannot place this run: only 2 of 3 engines of 5 GPUs fit on one node each",
        "  requested: ref 1 x 1 GPUs, 3 engines x 5 GPUs",
        "  free: 10.0.0.1: 6 of 8 GPUs, 64 CPUs; 10.0.0.2: 6 of 8 GPUs, 64 CPUs; "
        "10.0.0.3: 4 of 8 GPUs, 64 CPUs",
        "  would fit: ref 1 x 1 GPUs, 2 engines x 5 GPUs | ref 1 x 1 GPUs, 15 engines x 1 GPUs",
        "  RLHF_STACK_ALLOW_STRADDLE=1 lets engines straddle nodes, which is slow",
    ]


def test_engines_that_the_run_cannot_have_are_not_suggested() -> None:
    def suits(other: Request) -> bool:
        return other.engines is not None and other.engines.size < 3

    request = Request((), Engines(3, 6))
    sizes = [other.engines for other in nearest_requests(cluster(9, 9), request)]
    assert sizes == [Engines(2, 6), Engines(6, 3)]
    assert [other.engines for other in nearest_requests(cluster(9, 9), request, suits)] == [Engines(18, 1)]
    with pytest.raises(PlacementError) as refusal:
        plan(cluster(6, 6, 4), Request((), Engines(3, 5)), suits=lambda _: False)
    assert "would fit" not in str(refusal.value)


def test_smaller_engines_are_suggested_if_gpus_are_shared() -> None:
    request = Request((Group("actor", 2, 6),), Engines(3, 4, "actor"))
    assert [other.engines for other in nearest_requests(cluster(6, 6), request)] == [Engines(6, 2, "actor")]


@pytest.mark.parametrize(
    ("cpus", "spare", "reason"),
    [
        (2, 0, "CPUs are missing: each of the 8 GPUs needs a CPU on its node, and only 4 free GPUs have one"),
        (4, 1, "CPUs are missing: 8 for the GPUs and 1 for the controller are needed, 8 are free"),
    ],
)
def test_too_few_cpus_are_named(cpus: float, spare: int, reason: str) -> None:
    request = Request((Group("actor", 2, 4),), spare_cpus=spare)
    with pytest.raises(PlacementError, match=reason):
        plan(cluster(4, 4, cpus=cpus), request)


def test_too_few_gpus_are_an_error_even_if_straddling_is_allowed() -> None:
    with pytest.raises(PlacementError, match="16 GPUs are requested and 15 are free"):
        plan(cluster(8, 7), Request(engines=Engines(2, 8)), allow_straddle=True)


def test_engines_that_need_more_than_the_shared_gpus_are_an_error() -> None:
    with pytest.raises(PlacementError, match="2 engines of 4 GPUs cannot share the 4 GPUs of actor"):
        plan(cluster(8), Request((Group("actor", 1, 4),), Engines(2, 4, "actor")))


def test_allowed_straddling_is_limited_to_engines_that_do_not_fit() -> None:
    found = plan(cluster(6, 6), Request(engines=Engines(3, 4)), allow_straddle=True)
    assert found.engines == ((0,) * 4, (1,) * 4, (0, 0, 1, 1)) or found.engines[2] == (1, 1, 0, 0)
    assert found.straddling == (2,)
