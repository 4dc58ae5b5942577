"""Reservation without Ray: bundles of engines, and the descriptions of what a group lacks."""

from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlhf_stack.errors import UserError
from rlhf_stack.placement import reservation
from rlhf_stack.placement.model import Engines, FreeNode, PlacementError, Request


def test_engines_are_split_at_node_boundaries() -> None:
    assert reservation.engine_chunks(list("AAAABBBB"), 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert reservation.engine_chunks(list("ABBBBAAA"), 4) == [[0, 5, 6, 7], [1, 2, 3, 4]]
    assert reservation.engine_chunks(list("AAAAAABBBBBB"), 4) == [[0, 1, 2, 3], [6, 7, 8, 9], [4, 5, 10, 11]]


@given(st.lists(st.sampled_from("ABCD"), max_size=24), st.integers(1, 8))
def test_engine_chunks_are_complete_and_maximally_node_local(nodes: list[str], size: int) -> None:
    engines = reservation.engine_chunks(nodes, size)
    assert sorted(bundle for engine in engines for bundle in engine) == list(range(len(nodes)))
    whole = [engine for engine in engines if len(engine) == size and len({nodes[b] for b in engine}) == 1]
    assert len(whole) == sum(nodes.count(node) // size for node in set(nodes))


PINNED = [{"GPU": 1, "CPU": 1, "node:10.0.0.1": 0.001}] * 2


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (FreeNode("10.0.0.1", 1, 8, 8), "GPU is missing on 10.0.0.1: 2 needed, 1 free"),
        (FreeNode("10.0.0.1", 8, 1, 8), "CPU is missing on 10.0.0.1: 2 needed, 1 free"),
        (FreeNode("10.0.0.2", 8, 8, 8), "node 10.0.0.1 is gone"),
        (FreeNode("10.0.0.1", 8, 8, 8), "enough is free, but Ray has not placed it yet"),
    ],
)
def test_missing_resources_of_a_pinned_group_are_named(node: FreeNode, expected: str) -> None:
    assert reservation.describe_unplaced([node], PINNED) == expected


def test_missing_resources_of_any_group_are_named() -> None:
    bundles = [{"GPU": 1, "CPU": 1}] * 4
    assert reservation.describe_unplaced([FreeNode("a", 8, 2, 8)], bundles).startswith(
        "CPUs are missing: each of the 4 GPUs"
    )
    assert (
        reservation.describe_unplaced([FreeNode("a", 2, 8, 8)], bundles)
        == "4 GPUs are requested and 2 are free"
    )
    assert reservation.describe_unplaced([FreeNode("a", 8, 8, 8)], bundles).startswith("enough is free")


def test_missing_nodes_of_a_strictly_spread_group_are_counted() -> None:
    bundles = [{"GPU": 4, "CPU": 4}] * 2
    nodes = [FreeNode("a", 6, 8, 8), FreeNode("b", 2, 8, 8)]
    expected = "2 nodes with 4 GPUs and CPUs each are requested, 1 have them free"
    assert reservation.describe_unplaced(nodes, bundles) == expected


def test_driver_without_a_gpu_requests_a_sliver_of_a_cpu() -> None:
    assert reservation.driver_cpus(1) == 1
    assert 0 < reservation.driver_cpus(0) < 0.2


ONE, OTHER = FreeNode("10.0.0.1", 8, 8, 8), FreeNode("10.0.0.2", 8, 8, 8)


def test_restarted_machine_is_one_node_once_the_old_one_is_dead(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen = iter([[OTHER, ONE, OTHER], [OTHER, OTHER, ONE], [OTHER, ONE]])
    monkeypatch.setattr(reservation, "_live_nodes", lambda _: next(seen))
    monkeypatch.setattr(reservation, "POLL_SECONDS", 0)
    assert reservation.free_nodes() == [ONE, OTHER]
    assert caplog.messages == ["Ray lists two nodes at 10.0.0.2: waiting until the old one is dead"]


def test_nodes_that_share_an_address_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is a `UserError`, so commands print one line."""
    monkeypatch.setenv("RLHF_STACK_PLACEMENT_TIMEOUT", "0.1")
    monkeypatch.setattr(reservation, "_live_nodes", lambda _: [ONE, ONE, OTHER])
    monkeypatch.setattr(reservation, "POLL_SECONDS", 0)
    with pytest.raises(UserError, match=r"several have 10\.0\.0\.1 \(waited 0 s"):
        reservation.free_nodes()


def test_an_avoided_node_is_not_in_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservation, "_live_nodes", lambda _: [ONE, OTHER])
    monkeypatch.setattr(reservation, "Demand", MagicMock())
    request = Request(engines=Engines(1, 8))
    nodes, found = reservation._plan_on_free(request, 0.0, ["10.0.0.1"])
    assert [nodes[node].address for node in found.engines[0]] == ["10.0.0.2"] * 8
    with pytest.raises(PlacementError, match="8 GPUs"):
        reservation._plan_on_free(request, 0.0, ["10.0.0.1", "10.0.0.2"])
