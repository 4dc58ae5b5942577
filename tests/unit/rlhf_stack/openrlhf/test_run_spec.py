"""Run specifications from the arguments of OpenRLHF 0.5.1 and 0.11.2."""

from types import SimpleNamespace
from typing import Any

import pytest
from rlhf_stack.errors import UserError
from rlhf_stack.openrlhf.run_spec import is_flat, run_of
from rlhf_stack.placement.model import ENGINES, Engines, Group

FLAT: dict[str, Any] = {
    "actor_num_nodes": 2,
    "actor_num_gpus_per_node": 4,
    "ref_num_nodes": 1,
    "ref_num_gpus_per_node": 2,
    "critic_num_nodes": 1,
    "critic_num_gpus_per_node": 4,
    "reward_num_nodes": 1,
    "reward_num_gpus_per_node": 2,
    "colocate_actor_ref": False,
    "colocate_critic_reward": False,
    "vllm_num_engines": 2,
    "vllm_tensor_parallel_size": 4,
    "pretrain": "policy",
    "critic_pretrain": "value",
    "reward_pretrain": "judge",
    "remote_rm_url": None,
    "ref_reward_offload": False,
    "zero_stage": 2,
    "adam_offload": False,
    "grad_accum_dtype": None,
    "zpg": 1,
    "max_len": None,
    "prompt_max_len": 1024,
    "generate_max_len": 2048,
    "micro_train_batch_size": 4,
    "micro_rollout_batch_size": 8,
    "train_batch_size": 128,
    "gradient_checkpointing": True,
    "flash_attn": False,
    "lora_rank": 0,
    "enable_ema": False,
}


def flat(**changes: Any) -> SimpleNamespace:
    """Arguments of OpenRLHF 0.5.1."""
    return SimpleNamespace(**FLAT | changes)


def sections(**changes: Any) -> SimpleNamespace:
    """Arguments of OpenRLHF 0.11.2; ``changes`` by names such as ``train__colocate_all``."""
    groups: dict[str, dict[str, Any]] = {
        "actor": {"gradient_checkpointing_enable": False},
        "ref": {"offload": False},
        "critic": {},
        "reward": {"offload": False, "remote_url": None},
        "train": {
            "colocate_all": False,
            "colocate_actor_ref": False,
            "colocate_critic_reward": False,
            "async_enable": False,
            "dynamic_batch_enable": False,
            "max_tokens_per_gpu": 16192,
            "micro_batch_size": 2,
            "batch_size": 128,
            "enable_ema": False,
        },
        "rollout": {"micro_batch_size": 4, "max_tokens_per_gpu": None},
        "ds": {
            "zero_stage": 3,
            "adam_offload": True,
            "grad_accum_dtype": None,
            "overlap_comm": False,
            "zpg": 1,
            "attn_implementation": "sdpa",
            "enable_sleep": False,
            "tensor_parallel_size": 1,
            "ring_attn_size": 1,
            "lora": SimpleNamespace(rank=0),
        },
        "vllm": {
            "num_engines": 2,
            "tensor_parallel_size": 4,
            "gpu_memory_utilization": 0.8,
            "enable_sleep": False,
        },
        "data": {"max_len": 4096},
    }
    for role in ("actor", "ref", "critic", "reward"):
        groups[role] |= {"num_nodes": 1, "num_gpus_per_node": 8, "model_name_or_path": f"{role}-model"}
    for name, value in changes.items():
        group, _, key = name.partition("__")
        groups[group][key] = value
    kl = SimpleNamespace(kl=SimpleNamespace(init_coef=0.01))
    return SimpleNamespace(algo=kl, **{name: SimpleNamespace(**group) for name, group in groups.items()})


@pytest.mark.parametrize(
    ("release", "expected"), [("0.5.1", True), ("0.11.2+stack.1", False), ("0.9.0", False), ("1.0", False)]
)
def test_flags_have_sections_from_0_9_on(release: str, expected: bool) -> None:
    assert is_flat(release) == expected


def test_separate_roles_have_separate_gpus() -> None:
    run = run_of("0.5.1", flat())
    assert run.request.groups == (
        Group("actor", 2, 4, strict_spread=True),
        Group("ref", 1, 2, strict_spread=True),
        Group("critic", 1, 4, strict_spread=True),
        Group("reward", 1, 2, strict_spread=True),
    )
    assert run.request.engines == Engines(2, 4)
    assert run.request.size == 8 + 2 + 4 + 2 + 8
    assert run.order == ("actor", "ref", "critic", "reward", ENGINES)
    assert run.length == 3072
    assert run.attention == "eager"


def test_colocated_roles_count_once() -> None:
    run = run_of("0.5.1", flat(colocate_actor_ref=True, colocate_critic_reward=True))
    assert run.request.size == 8 + 4 + 8
    assert {role.name: role.group for role in run.roles} == {
        "actor": "actor",
        "ref": "actor",
        "critic": "critic",
        "reward": "critic",
    }


def test_several_reward_models_are_several_roles() -> None:
    run = run_of("0.5.1", flat(reward_pretrain="judge,jury"))
    assert [(role.name, role.model) for role in run.roles if role.value_head and not role.trained] == [
        ("reward", "judge"),
        ("reward1", "jury"),
    ]
    assert run.request.size == 8 + 2 + 4 + 2 + 2 + 8


def test_two_reward_models_cannot_share_the_critics_gpus() -> None:
    with pytest.raises(UserError, match="allows one reward model"):
        run_of("0.5.1", flat(reward_pretrain="judge,jury", colocate_critic_reward=True))


def test_remote_reward_and_absent_critic_request_nothing() -> None:
    run = run_of("0.5.1", flat(remote_rm_url=["http://x"], critic_pretrain=None, vllm_num_engines=None))
    assert [role.name for role in run.roles] == ["actor", "ref"]
    assert run.request.engines is None


def test_0_11_is_read_from_its_sections() -> None:
    run = run_of("0.11.2", sections())
    assert [(role.name, role.model) for role in run.roles] == [
        ("actor", "actor-model"),
        ("ref", "actor-model"),
        ("critic", "critic-model"),
        ("reward", "reward-model"),
    ]
    assert (run.train_batch, run.rollout_batch, run.length, run.utilization) == (2, 4, 4096, 0.8)
    assert run.request.size == 4 * 8 + 8
    assert not run.flat


def test_gpus_shared_by_all_count_once() -> None:
    run = run_of("0.11.2", sections(train__colocate_all=True))
    assert run.request.size == 8
    assert {role.group for role in run.roles} == {"actor"}
    assert run.request.engines == Engines(2, 4, "actor")


def test_dynamic_batches_are_in_tokens() -> None:
    assert run_of("0.11.2", sections()).tokens is None
    assert run_of("0.11.2", sections(train__dynamic_batch_enable=True)).tokens == 16192


def test_untrained_model_is_sharded_at_stage_3_only() -> None:
    run = run_of("0.11.2", sections(ref__offload=True))
    actor, ref = run.zero_of(run.roles[0]), run.zero_of(run.roles[1])
    assert (actor.stage, actor.ranks, actor.offload) == (3, 8, True)
    assert (ref.stage, ref.offload, ref.offload_weights) == (3, False, True)
    below = run_of("0.11.2", sections(ref__offload=True, ds__zero_stage=2))
    assert below.zero_of(below.roles[1]).stage == 0
    assert not below.zero_of(below.roles[1]).offload_weights


def test_tensor_parallel_ranks_do_not_shard_the_optimizer_again() -> None:
    run = run_of("0.11.2", sections(ds__tensor_parallel_size=2))
    assert run.zero_of(run.roles[0]).ranks == 4
    assert run.request.tp_sp_size == 2


def test_rank_batch_is_at_most_the_batch_of_a_step() -> None:
    assert run_of("0.11.2", sections()).rank_batch == 16
    assert run_of("0.11.2", sections(train__batch_size=4)).rank_batch == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ds__load_in_4bit": True}, "--ds.load_in_4bit"),
        ({"ds__tensor_parallel_size": 2}, "--ds.tensor_parallel_size > 1"),
        ({"vllm__sync_with_ray": True}, "--vllm.sync_with_ray"),
    ],
)
def test_lora_is_refused_where_engines_cannot_load_it(changes: dict[str, Any], reason: str) -> None:
    lora = {"ds__lora": SimpleNamespace(rank=8)}
    with pytest.raises(UserError, match=f"LoRA does not work with {reason}"):
        run_of("0.11.2", sections(**lora, **changes))
    assert run_of("0.11.2", sections(**changes)).lora == 0
    assert run_of("0.11.2", sections(**lora, **changes, vllm__num_engines=0)).lora == 8


def test_lora_is_accepted_where_its_weights_are_merged() -> None:
    lora = {"ds__lora": SimpleNamespace(rank=8)}
    for shared in ({"vllm__sync_backend": "gloo"}, {"vllm__sync_backend": "nccl"}, {}):
        assert run_of("0.11.2", sections(**lora, train__colocate_all=True, **shared)).lora == 8
    assert run_of("0.5.1", flat(lora_rank=8)).lora == 8
    with pytest.raises(UserError, match="LoRA does not work with --load_in_4bit"):
        run_of("0.5.1", flat(lora_rank=8, load_in_4bit=True))
