"""The successors of flags that a release replaced."""

import pytest
from rlhf_stack.openrlhf.renamed_flags import hint, hints

ENABLE, TYPE = "--algo.advantage.is_correction_enable", "--algo.advantage.is_correction_type"
LEVEL, MODE = "--algo.advantage.is_correction_level", "--algo.advantage.is_correction_mode"


@pytest.mark.parametrize(
    ("unrecognized", "instead"),
    [
        (ENABLE, f"instead of {ENABLE} use {LEVEL} token {MODE} clip"),
        (f"{ENABLE} {TYPE} tis", f"use {LEVEL} token {MODE} clip"),
        (f"{ENABLE} {TYPE} icepop", f"instead of {ENABLE} and {TYPE} icepop use {LEVEL} token {MODE} mask"),
        (f"{TYPE}=seq-mask-tis", f"use {LEVEL} seq {MODE} mask"),
        ("--bogus 2", ""),
        (f"{ENABLE}d", ""),
    ],
)
def test_successors_are_named(unrecognized: str, instead: str) -> None:
    found = hint(f"unrecognized arguments: {unrecognized}")
    assert instead in found
    assert bool(instead) == bool(found)


OPTIONS = (
    *("--actor.num_nodes", "--actor.model_name_or_path", "--algo.kl.init_coef", "--ds.zero_stage"),
    *("--eval.temperature", "--rollout.temperature", "--train.micro_batch_size"),
    *("--rollout.micro_batch_size", "--actor.adam.lr", "--actor.adam.weight_decay"),
    *("--critic.adam.weight_decay", "--critic.model_name_or_path", "--critic.freezing_steps"),
    *("--algo.kl.estimator", "--logger.tensorboard_dir", "--ref.offload", "--reward.offload"),
    "--reward.remote_url",
)
OF_SFT = ("--adam.lr", "--adam.weight_decay", "--model.model_name_or_path", "--model.pretrain_mode_enable")


@pytest.mark.parametrize(
    ("unrecognized", "expected"),
    [
        ("--zero_stage 3", ["instead of --zero_stage use --ds.zero_stage"]),
        ("--actor_num_nodes=2", ["instead of --actor_num_nodes use --actor.num_nodes"]),
        ("--micro_train_batch_size 4", ["instead of --micro_train_batch_size use --train.micro_batch_size"]),
        ("--init_kl_coef 0.1", ["instead of --init_kl_coef use --algo.kl.init_coef"]),
        ("--temperature 1", ["instead of --temperature use --eval.temperature or --rollout.temperature"]),
        ("--pretrain m", ["instead of --pretrain use --actor.model_name_or_path"]),
        ("--prompt_data d", []),  # its successor is not an option of this program
        ("--actor_learning_rate 1e-6", ["instead of --actor_learning_rate use --actor.adam.lr"]),
        (
            "--l2 0.1",
            ["instead of --l2 use --actor.adam.weight_decay and --critic.adam.weight_decay"],
        ),
        ("--critic_pretrain m", ["instead of --critic_pretrain use --critic.model_name_or_path"]),
        ("--freezing_actor_steps 9", ["instead of --freezing_actor_steps use --critic.freezing_steps"]),
        ("--use_kl_estimator_k3", ["instead of --use_kl_estimator_k3 use --algo.kl.estimator k3"]),
        ("--use_tensorboard x", ["instead of --use_tensorboard use --logger.tensorboard_dir"]),
        ("--remote_rm_url http://x", ["instead of --remote_rm_url use --reward.remote_url"]),
        ("--ref_reward_offload", ["instead of --ref_reward_offload use --ref.offload and --reward.offload"]),
        ("--perf", ["leave --perf out, which has no successor"]),
        ("--pretrain_data d", ["leave --pretrain_data out, which has no successor"]),
        ("--ds.zero_stag 3", ["did you mean '--ds.zero_stage'?"]),
        ("--bogus 2 x--y", []),
        (f"{ENABLE} --zero_stage 3", [hint(ENABLE), "instead of --zero_stage use --ds.zero_stage"]),
    ],
)
def test_flat_flags_name_their_nested_successors(unrecognized: str, expected: list[str]) -> None:
    assert hints(f"unrecognized arguments: {unrecognized}", OPTIONS) == expected


@pytest.mark.parametrize(
    ("flag", "successor"),
    [
        ("--pretrain", "--model.model_name_or_path"),  # not --model.pretrain_mode_enable
        ("--learning_rate", "--adam.lr"),
        ("--l2", "--adam.weight_decay"),
    ],
)
def test_a_trainer_without_ray_has_its_own_successors(flag: str, successor: str) -> None:
    found = hints(f"unrecognized arguments: {flag} x", OF_SFT)
    assert found == [f"instead of {flag} use {successor}"]
