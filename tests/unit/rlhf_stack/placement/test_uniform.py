"""Uniform plans: which runs have one, and which are packed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlhf_stack.placement import Engines, FreeNode, Group, Request, plan
from rlhf_stack.placement.model import ENGINES
from rlhf_stack.placement.uniform import uniform_plan


def test_six_and_two_on_each_of_two_nodes() -> None:
    nodes = [FreeNode(f"n{index}", 8, 64, 8) for index in range(2)]
    found = plan(nodes, Request((Group("actor", 2, 6),), Engines(2, 2)))
    assert found.bundles == {"actor": (0,) * 6 + (1,) * 6, ENGINES: (0, 0, 1, 1)}
    assert found.engines == ((0, 0), (1, 1))
    assert found.straddling == ()


def test_head_without_gpus_is_ignored() -> None:
    found = uniform_plan([0, 8, 8], Request((Group("actor", 2, 6),), Engines(2, 2)))
    assert found is not None
    assert found.engines == ((1, 1), (2, 2))


@pytest.mark.parametrize(
    ("free", "request_"),
    [
        ((8, 8), Request((Group("actor", 2, 4),), Engines(2, 4))),  # one node is enough for the actor
        ((8, 8), Request((Group("actor", 1, 12),), Engines(2, 2))),  # not asked for by node
        ((8, 7), Request((Group("actor", 2, 6),), Engines(1, 2))),  # uneven nodes
        ((8, 8), Request((Group("actor", 2, 6),), Engines(1, 4))),  # one engine for two nodes
        ((8, 8), Request((Group("actor", 2, 6),), Engines(2, 2), tp_sp_size=4)),  # blocks would be cut
        ((8, 8), Request((Group("actor", 2, 8),), Engines(4, 4, "actor"))),  # engines share
        ((8, 8), Request((), Engines(4, 4))),
        ((8,), Request((Group("actor", 1, 8),))),
    ],
    ids=str,
)
def test_other_runs_have_no_uniform_plan(free: tuple[int, ...], request_: Request) -> None:
    assert uniform_plan(free, request_) is None


@given(st.integers(2, 6), st.integers(1, 8), st.integers(0, 3), st.integers(1, 4), st.integers(1, 2))
def test_uniform_plan_is_complete_and_within_capacity(
    nodes: int, free: int, engines: int, size: int, groups: int
) -> None:
    for per_node in range(1, free + 1):
        request = Request(
            tuple(Group(f"g{index}", nodes, per_node) for index in range(groups)),
            Engines(engines * nodes, size) if engines else None,
        )
        found = uniform_plan([free] * nodes, request)
        if found is None:
            continue
        taken = [node for bundles in found.bundles.values() for node in bundles]
        assert len(taken) == request.size
        assert {taken.count(node) for node in range(nodes)} == {request.size // nodes}
        assert request.size // nodes <= free
        assert all(len(set(of_engine)) == 1 and len(of_engine) == size for of_engine in found.engines)
