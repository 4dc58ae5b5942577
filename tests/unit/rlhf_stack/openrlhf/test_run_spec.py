"""Run specifications from the arguments of OpenRLHF 0.5.1 and 0.11.2."""

from types import SimpleNamespace
from typing import Any

import pytest
from rlhf_stack.errors import UserError
from rlhf_stack.openrlhf.run_spec import is_flat, run_of
from rlhf_stack.placement.model import ENGINES, Engines

from tests.unit.openrlhf_arguments import flat, sections


@pytest.mark.parametrize(
    ("release", "expected"), [("0.5.1", True), ("0.11.2+stack.1", False), ("0.9.0", False), ("1.0", False)]
)
def test_flags_have_sections_from_0_9_on(release: str, expected: bool) -> None:
    assert is_flat(release) == expected


def test_separate_roles_have_separate_gpus() -> None:
    run = run_of("0.5.1", flat())
    assert run.request.size == 8 + 2 + 4 + 2 + 8
    assert run.order == ("actor", "ref", "critic", "reward", ENGINES)
    assert run.length == 3072
    assert run.attention == "eager"


def test_colocated_roles_count_once() -> None:
    sizes = {"ref_num_nodes": 2, "ref_num_gpus_per_node": 4, "reward_num_gpus_per_node": 4}
    run = run_of("0.5.1", flat(colocate_actor_ref=True, colocate_critic_reward=True, **sizes))
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


def test_the_backend_of_the_weight_sync_is_read() -> None:
    """On shared GPUs ``auto`` is upstream's CUDA IPC, which nccl names."""
    assert run_of("0.11.2", sections(vllm__sync_backend="gloo")).sync_backend == "gloo"
    assert run_of("0.11.2", sections(vllm__sync_backend="auto")).sync_backend == "auto"
    assert run_of("0.5.1", flat(vllm_sync_backend="gloo")).sync_backend == "gloo"
    shared = sections(vllm__sync_backend="auto", train__colocate_all=True)
    assert run_of("0.11.2", shared).sync_backend == "nccl"


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
    run = run_of("0.11.2", sections(ds__tensor_parallel_size=2, ds__zero_stage=2))
    assert run.zero_of(run.roles[0]).ranks == 4
    assert run.request.tp_sp_size == 2


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"ds__zpg": 3}, True),
        ({"ds__zpg": 4}, False),
        ({"ds__zpg": 16}, False),
        ({"ds__zpg": 3, "ds__zero_stage": 2}, False),
    ],
    ids=str,
)
def test_the_group_of_a_second_copy_of_the_weights_divides_the_ranks(
    changes: dict[str, Any], refused: bool
) -> None:
    """DeepSpeed takes the number of ranks if there are fewer, and otherwise ends when it starts."""
    if not refused:
        assert run_of("0.11.2", sections(**changes)).zero.shards == changes["ds__zpg"]
        return
    with pytest.raises(UserError, match=r"actor has 8 ranks, which must be a multiple of 3: .*\(--ds.zpg\)"):
        run_of("0.11.2", sections(**changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ds__tensor_parallel_size": 2}, "transformers loads no weights for --ds.tensor_parallel_size > 1"),
        ({"actor__optim": "muon"}, "DeepSpeed refuses Muon"),
        ({"critic__optim": "muon"}, "DeepSpeed refuses Muon"),
    ],
    ids=str,
)
def test_what_cannot_start_at_stage_3_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=f"--ds.zero_stage 3: {reason}.*: give --ds.zero_stage 2, or"):
        run_of("0.11.2", sections(**changes))
    below = run_of("0.11.2", sections(**changes, ds__zero_stage=2))
    assert below.obstacle_to_stage_3
    assert not run_of("0.11.2", sections(actor__optim="adam")).obstacle_to_stage_3


def test_weights_of_4_bits_are_loaded_otherwise_at_stage_3() -> None:
    split = sections(ds__tensor_parallel_size=2, ds__load_in_4bit=True)
    assert run_of("0.11.2", split).tensor_parallel == 2


def test_rank_batch_is_at_most_the_batch_of_a_step() -> None:
    assert run_of("0.11.2", sections()).rank_batch == 16
    assert run_of("0.11.2", sections(train__batch_size=4)).rank_batch == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ds__load_in_4bit": True}, "--ds.load_in_4bit"),
        ({"ds__tensor_parallel_size": 2, "ds__zero_stage": 2}, "--ds.tensor_parallel_size > 1"),
        ({"vllm__sync_with_ray": True}, "--vllm.sync_with_ray"),
    ],
)
def test_lora_is_refused_where_engines_cannot_load_it(changes: dict[str, Any], reason: str) -> None:
    lora = {"ds__lora": SimpleNamespace(rank=8)}
    with pytest.raises(UserError, match=f"LoRA does not work with {reason}"):
        run_of("0.11.2", sections(**lora, **changes))
    assert run_of("0.11.2", sections(**changes)).lora == 0
    assert run_of("0.11.2", sections(**lora, **changes, vllm__num_engines=0)).lora == 8


def test_another_dtype_than_the_engines_is_refused() -> None:
    with pytest.raises(UserError, match=r"--ds\.param_dtype fp16: .* bfloat16, .*; use bf16"):
        run_of("0.11.2", sections(ds__param_dtype="fp16"))
    for accepted in ({"ds__param_dtype": "bf16"}, {"ds__param_dtype": "fp16", "vllm__num_engines": 0}):
        assert run_of("0.11.2", sections(**accepted))


def test_lora_is_accepted_where_its_weights_are_merged() -> None:
    lora = {"ds__lora": SimpleNamespace(rank=8)}
    for shared in ({"vllm__sync_backend": "gloo"}, {"vllm__sync_backend": "nccl"}, {}):
        assert run_of("0.11.2", sections(**lora, train__colocate_all=True, **shared)).lora == 8
    assert run_of("0.5.1", flat(lora_rank=8)).lora == 8
    with pytest.raises(UserError, match="LoRA does not work with --load_in_4bit"):
        run_of("0.5.1", flat(lora_rank=8, load_in_4bit=True))


@pytest.mark.parametrize(
    ("stage", "gradients", "named"),
    [(0, None, "0"), (0, "fp32", "0 and --ds.grad_accum_dtype fp32"), (1, "fp32", "1 and --ds.grad_accum")],
)
def test_a_trainer_sleeps_only_with_an_optimizer_that_can_move(
    stage: int, gradients: str | None, named: str
) -> None:
    """DeepSpeed 0.19.6: ``BF16_Optimizer`` and ``FP16_Optimizer`` have no ``offload_states``."""
    sleeping = {"ds__enable_sleep": True, "ds__zero_stage": stage, "ds__grad_accum_dtype": gradients}
    sleeping |= {"ds__adam_offload": False}
    with pytest.raises(UserError, match=f"^--ds.enable_sleep: with --ds.zero_stage {named}.* give --ds.zero"):
        run_of("0.11.2", sections(**sleeping))
    assert not run_of("0.11.2", sections(**(sleeping | {"ds__enable_sleep": False}))).can_sleep
    for change in ({"ds__zero_stage": 2}, {"ds__zero_stage": 1, "ds__grad_accum_dtype": None}):
        assert run_of("0.11.2", sections(**(sleeping | change))).can_sleep
    assert run_of("0.11.2", sections(**(sleeping | {"ds__adam_offload": True}))).can_sleep
