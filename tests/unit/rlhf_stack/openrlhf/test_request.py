"""The placement request of a run, from the arguments of OpenRLHF 0.11 and 0.5."""

from types import SimpleNamespace
from typing import Any

import pytest
from rlhf_stack.errors import UserError
from rlhf_stack.openrlhf.request import request_of, upstream_order
from rlhf_stack.placement.model import ENGINES, Engines, Group, PlacementError, Request

from tests.unit import openrlhf_arguments


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
def test_roles_share_groups_as_in_upstream(
    train: dict[str, bool], groups: tuple[Group, ...], shares: str | None, order: list[str]
) -> None:
    args = arguments(**train)
    request, roles = request_of(args)
    assert request == Request(groups, Engines(2, 4, shares), tp_sp_size=4, spare_cpus=1)
    assert set(roles) == {"actor", "ref", "critic", "reward"}
    assert set(roles.values()) == {group.name for group in groups}
    assert upstream_order(args) == order


def test_absent_roles_request_nothing() -> None:
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
    return openrlhf_arguments.flat(**sizes | changes)


FLAT_ENGINES = Engines(2, 4)
SPREAD = Group("actor", 2, 4, strict_spread=True)


def test_roles_of_0_5_are_strictly_spread_as_in_upstream() -> None:
    request, roles = request_of(flat())
    groups = (SPREAD, Group("ref", 2, 4, strict_spread=True), Group("critic", 1, 1), Group("reward", 1, 1))
    assert request == Request(groups, FLAT_ENGINES)
    assert roles == {group.name: group.name for group in groups}
    request, roles = request_of(flat(colocate_actor_ref=True, colocate_critic_reward=True))
    assert request == Request((SPREAD, Group("critic", 1, 1, strict_spread=True)), FLAT_ENGINES)
    assert roles == {"actor": "actor", "ref": "actor", "critic": "critic", "reward": "critic"}


def test_each_reward_model_of_0_5_has_a_group_and_at_most_one_shares_the_critics() -> None:
    _, roles = request_of(flat(reward_pretrain="a,b", critic_pretrain=None, colocate_critic_reward=True))
    assert roles == {name: name for name in ("actor", "ref", "reward", "reward1")}
    with pytest.raises(PlacementError, match="allows one reward model"):
        request_of(flat(reward_pretrain="a,b", colocate_critic_reward=True))


def test_remote_reward_of_0_5_needs_a_cpu_and_no_group() -> None:
    request, roles = request_of(flat(remote_rm_url=["http://rewards"], vllm_num_engines=0))
    assert (request.engines, request.spare_cpus) == (None, 1)
    assert set(roles) == {"actor", "ref", "critic"}


PAIR = {"colocate_critic_reward": True}
MISMATCH = (
    "{} and {} share GPUs but have {} and {} GPUs: give both the same number of nodes, and of GPUs on each"
)


@pytest.mark.parametrize(
    ("train", "sizes", "kl", "refused"),
    [
        ({}, {"ref": (1, 8)}, 0.1, ""),
        (
            {"colocate_actor_ref": True},
            {"ref": (1, 8)},
            0.1,
            MISMATCH.format("actor", "ref", "2 x 4", "1 x 8"),
        ),
        ({"colocate_all": True}, {"ref": (2, 2)}, 0.1, MISMATCH.format("actor", "ref", "2 x 4", "2 x 2")),
        ({"colocate_all": True}, {"ref": (1, 8)}, 0, ""),
        (PAIR, {"reward": (2, 1)}, 0.1, MISMATCH.format("critic", "reward", "1 x 2", "2 x 1")),
        ({"colocate_all": True}, {"critic": (1, 8)}, 0.1, ""),
        (
            {"colocate_all": True},
            {"critic": (2, 8)},
            0.1,
            "critic has 16 ranks but shares the 8 GPUs of actor: give it at most 8",
        ),
        (
            {"colocate_all": True},
            {"reward": (3, 3)},
            0.1,
            "reward has 9 ranks but shares the 8 GPUs of actor: give it at most 8",
        ),
        ({"colocate_all": True} | PAIR, {"critic": (2, 8), "reward": (2, 8)}, 0.1, ""),
    ],
    ids=str,
)
def test_sizes_that_openrlhf_asserts_for_shared_gpus(
    train: dict[str, bool], sizes: dict[str, tuple[int, int]], kl: float, refused: str
) -> None:
    """Such runs fitted, and ended at their start. Fewer ranks of critic or reward than of the actor work."""
    args = arguments(**train)
    args.algo.kl.init_coef = kl
    for name, size in sizes.items():
        setattr(args, name, role(*size))
    if not refused:
        request_of(args)
        return
    with pytest.raises(UserError) as raised:
        request_of(args)
    assert str(raised.value) == refused


def test_a_pair_is_compared_with_a_reward_model_that_is_remote() -> None:
    """OpenRLHF compares its flags, here the default of 8 GPUs, though it starts no such model."""
    args = arguments(**PAIR)
    args.reward = role(1, 8)
    args.reward.remote_url = "http://rewards"
    with pytest.raises(UserError, match="critic and reward share GPUs but have 1 x 2 and 1 x 8 GPUs"):
        request_of(args)
    args.critic.model_name_or_path = None
    assert "critic" not in request_of(args)[1]


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"colocate_actor_ref": True, "ref_num_nodes": 1, "ref_num_gpus_per_node": 8}, "2 x 4 and 1 x 8"),
        (PAIR | {"reward_num_gpus_per_node": 2}, "1 x 1 and 1 x 2"),
        (PAIR | {"reward_num_gpus_per_node": 2, "remote_rm_url": ["http://rewards"]}, "1 x 1 and 1 x 2"),
    ],
)
def test_sizes_that_0_5_asserts_for_shared_gpus(changes: dict[str, Any], refused: str) -> None:
    with pytest.raises(UserError, match=f"share GPUs but have {refused} GPUs"):
        request_of(flat(**changes))
