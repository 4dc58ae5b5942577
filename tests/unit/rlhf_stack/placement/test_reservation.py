"""The edge to Ray, without Ray: what a run asks for, how a group is cut, and what a group lacks."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlhf_stack.errors import UserError
from rlhf_stack.openrlhf.request import request_of, upstream_order
from rlhf_stack.placement import reservation
from rlhf_stack.placement.model import ENGINES, Engines, FreeNode, Group, PlacementError, Request


def role(nodes: int, gpus: int) -> SimpleNamespace:
    return SimpleNamespace(num_nodes=nodes, num_gpus_per_node=gpus, model_name_or_path="m", remote_url=None)


def arguments(**train: bool) -> Any:
    """Four roles and two engines."""
    options = dict.fromkeys(
        ["colocate_actor_ref", "colocate_all", "colocate_critic_reward", "async_enable"], False
    )
    return SimpleNamespace(
        train=SimpleNamespace(**(options | train)),
        actor=role(2, 4),
        ref=role(2, 4),
        critic=role(1, 2),
        reward=role(1, 2),
        algo=SimpleNamespace(kl=SimpleNamespace(init_coef=0.1)),
        vllm=SimpleNamespace(num_engines=2, tensor_parallel_size=4),
        ds=SimpleNamespace(ring_attn_size=2, tensor_parallel_size=2),
    )


ACTOR, REF = Group("actor", 2, 4), Group("ref", 2, 4)
CRITIC, REWARD = Group("critic", 1, 2), Group("reward", 1, 2)


@pytest.mark.parametrize(
    ("train", "groups", "shares", "order"),
    [
        ({}, (ACTOR, REF, CRITIC, REWARD), None, [ENGINES, "actor", "ref", "critic", "reward"]),
        (
            {"colocate_actor_ref": True, "colocate_critic_reward": True},
            (ACTOR, CRITIC),
            None,
            ["actor", ENGINES, "critic"],
        ),
        ({"colocate_all": True}, (ACTOR,), "actor", ["actor"]),
        ({"colocate_all": True, "async_enable": True}, (ACTOR,), None, ["actor", ENGINES]),
        (
            {"colocate_all": True, "colocate_critic_reward": True},
            (ACTOR, CRITIC),
            "actor",
            ["actor", "critic"],
        ),
    ],
    ids=["separate", "pairs", "all", "all but engines", "all and a pair"],
)
def test_roles_share_groups_as_upstream_has_them(
    train: dict[str, bool], groups: tuple[Group, ...], shares: str | None, order: list[str]
) -> None:
    args = arguments(**train)
    request, roles = request_of(args)
    assert request == Request(groups, Engines(2, 4, shares), tp_sp_size=4, spare_cpus=1)
    assert set(roles) == {"actor", "ref", "critic", "reward"}
    assert set(roles.values()) == {group.name for group in groups}
    assert upstream_order(args) == order


def test_roles_that_a_run_does_not_have_take_nothing() -> None:
    args = arguments()
    args.algo.kl.init_coef = 0
    args.critic.model_name_or_path = None
    args.reward.remote_url = "http://rewards"
    args.vllm.num_engines = None
    assert request_of(args) == (Request((ACTOR,), None, tp_sp_size=4, spare_cpus=1), {"actor": "actor"})


def flat(**changes: Any) -> Any:
    """OpenRLHF 0.5's arguments: four roles, two engines."""
    roles = {"actor": (2, 4), "ref": (2, 4), "critic": (1, 1), "reward": (1, 1)}
    sizes = {f"{name}_num_nodes": nodes for name, (nodes, _) in roles.items()}
    sizes |= {f"{name}_num_gpus_per_node": gpus for name, (_, gpus) in roles.items()}
    options = {
        "colocate_actor_ref": False,
        "colocate_critic_reward": False,
        "critic_pretrain": "m",
        "reward_pretrain": "m",
        "remote_rm_url": None,
        "vllm_num_engines": 2,
        "vllm_tensor_parallel_size": 4,
    }
    return SimpleNamespace(**(sizes | options | changes))


FLAT_ENGINES = Engines(2, 4, separate_groups=True)
SPREAD = Group("actor", 2, 4, strict_spread=True)


def test_roles_of_the_older_openrlhf_are_spread_where_it_spreads_them() -> None:
    request, roles = request_of(flat())
    apart = (SPREAD, Group("ref", 2, 4, strict_spread=True), Group("critic", 1, 1), Group("reward", 1, 1))
    assert request == Request(apart, FLAT_ENGINES)
    assert roles == {group.name: group.name for group in apart}
    request, roles = request_of(flat(colocate_actor_ref=True, colocate_critic_reward=True))
    assert request == Request((SPREAD, Group("critic", 1, 1, strict_spread=True)), FLAT_ENGINES)
    assert roles == {"actor": "actor", "ref": "actor", "critic": "critic", "reward": "critic"}


def test_every_reward_model_of_the_older_openrlhf_has_a_group_and_one_at_most_shares_the_critics() -> None:
    _, roles = request_of(flat(reward_pretrain="a,b", critic_pretrain=None, colocate_critic_reward=True))
    assert roles == {name: name for name in ("actor", "ref", "reward", "reward1")}
    with pytest.raises(PlacementError, match="allows one reward model"):
        request_of(flat(reward_pretrain="a,b", colocate_critic_reward=True))


def test_a_reward_function_of_the_older_openrlhf_needs_a_cpu_and_no_group() -> None:
    request, roles = request_of(flat(remote_rm_url=["http://rewards"], vllm_num_engines=0))
    assert (request.engines, request.spare_cpus) == (None, 1)
    assert set(roles) == {"actor", "ref", "critic"}


def test_engines_are_cut_where_the_nodes_end() -> None:
    assert reservation.engine_chunks(list("AAAABBBB"), 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert reservation.engine_chunks(list("ABBBBAAA"), 4) == [[0, 5, 6, 7], [1, 2, 3, 4]]
    assert reservation.engine_chunks(list("AAAAAABBBBBB"), 4) == [[0, 1, 2, 3], [6, 7, 8, 9], [4, 5, 10, 11]]


@given(st.lists(st.sampled_from("ABCD"), max_size=24), st.integers(1, 8))
def test_a_cut_has_every_bundle_once_and_as_many_whole_engines_as_there_can_be(
    nodes: list[str], size: int
) -> None:
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
def test_what_a_pinned_group_waits_for_is_named(node: FreeNode, expected: str) -> None:
    assert reservation.describe_unplaced([node], PINNED) == expected


def test_what_any_group_waits_for_is_named() -> None:
    bundles = [{"GPU": 1, "CPU": 1}] * 4
    assert reservation.describe_unplaced([FreeNode("a", 8, 2, 8)], bundles).startswith(
        "CPUs are missing: each of the 4 GPUs"
    )
    assert (
        reservation.describe_unplaced([FreeNode("a", 2, 8, 8)], bundles)
        == "4 GPUs are requested and 2 are free"
    )
    assert reservation.describe_unplaced([FreeNode("a", 8, 8, 8)], bundles).startswith("enough is free")


def test_nodes_that_a_group_of_whole_nodes_lacks_are_counted() -> None:
    bundles = [{"GPU": 4, "CPU": 4}] * 2
    nodes = [FreeNode("a", 6, 8, 8), FreeNode("b", 2, 8, 8)]
    expected = "2 nodes with 4 GPUs and CPUs each are requested, 1 have them free"
    assert reservation.describe_unplaced(nodes, bundles) == expected


def test_a_driver_without_a_gpu_asks_for_a_sliver_of_a_cpu() -> None:
    assert reservation.driver_cpus(1) == 1
    assert 0 < reservation.driver_cpus(0) < 0.2


ONE, OTHER = FreeNode("10.0.0.1", 8, 8, 8), FreeNode("10.0.0.2", 8, 8, 8)


def test_a_machine_that_was_started_again_is_one_node_once_ray_finds_the_old_one_dead(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen = iter([[OTHER, ONE, OTHER], [OTHER, OTHER, ONE], [OTHER, ONE]])
    monkeypatch.setattr(reservation, "_living", lambda _: next(seen))
    monkeypatch.setattr(reservation, "POLL_SECONDS", 0)
    assert reservation.free_nodes() == [ONE, OTHER]
    assert caplog.messages == ["Ray lists two nodes at 10.0.0.2: waiting until the old one is dead"]


def test_nodes_that_keep_one_address_are_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which commands show the line alone."""
    monkeypatch.setenv("RLHF_STACK_PLACEMENT_TIMEOUT", "0.1")
    monkeypatch.setattr(reservation, "_living", lambda _: [ONE, ONE, OTHER])
    monkeypatch.setattr(reservation, "POLL_SECONDS", 0)
    with pytest.raises(UserError, match=r"several have 10\.0\.0\.1 \(waited 0 s"):
        reservation.free_nodes()
