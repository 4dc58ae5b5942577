"""What of an episode's last samples is trained."""

from types import SimpleNamespace
from typing import Any

import pytest
from rlhf_stack.openrlhf import last_batch
from rlhf_stack.telemetry import run_log


def arguments(**changes: Any) -> Any:
    """GSM8K on 8 GPUs: a critic, a reward model and a reference model only if ``changes`` has them."""
    values: dict[str, Any] = {
        "actor.num_nodes": 1,
        "actor.num_gpus_per_node": 8,
        "algo.dynamic_filtering_enable": False,
        "algo.kl": SimpleNamespace(init_coef=0.0),
        "critic.model_name_or_path": None,
        "critic.num_nodes": 1,
        "critic.num_gpus_per_node": 3,
        "ds.ring_attn_size": 1,
        "ds.tensor_parallel_size": 1,
        "ref.num_nodes": 1,
        "ref.num_gpus_per_node": 3,
        "reward.num_nodes": 1,
        "reward.num_gpus_per_node": 3,
        "reward.remote_url": ["reward.py"],
        "rollout.batch_size": 128,
        "rollout.n_samples_per_prompt": 8,
        "rollout.micro_batch_size": 8,
        "train.batch_size": 128,
        "train.dynamic_batch_enable": False,
    } | {name.replace("__", "."): value for name, value in changes.items()}
    made: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, _, key = name.partition(".")
        made.setdefault(section, {})[key] = value
    return SimpleNamespace(**{section: SimpleNamespace(**content) for section, content in made.items()})


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    logged: list[str] = []
    monkeypatch.setattr(run_log, "warning", logged.append)
    return logged


def kept(count: int, args: Any, *, is_drained: bool = True) -> int:
    samples = list(range(count))
    found = last_batch.leave_out_incomplete_batch(samples, args, is_drained=is_drained)
    assert found == samples[: len(found)]
    return len(found)


def test_the_rest_of_gsm8k_is_trained_up_to_what_all_ranks_can_train(warnings: list[str]) -> None:
    rest = 7473 % 128 * 8
    assert kept(rest, arguments()) == 384
    [line] = warnings
    assert "the last 8 samples" in line
    assert "of 392" in line
    assert "multiples of 128" in line


@pytest.mark.parametrize(("count", "is_drained"), [(0, True), (1024, True), (392, False), (384, True)])
def test_other_steps_are_unchanged(count: int, is_drained: bool, warnings: list[str]) -> None:
    assert kept(count, arguments(), is_drained=is_drained) == count
    assert not warnings


@pytest.mark.parametrize(
    ("changes", "unit"),
    [
        ({}, 128),
        ({"train__batch_size": 64, "rollout__micro_batch_size": 4}, 64),
        ({"train__batch_size": 8, "rollout__micro_batch_size": 4}, 32),
        ({"train__batch_size": 8, "actor__num_nodes": 2}, 128),
        ({"train__batch_size": 8, "ds__ring_attn_size": 2, "ds__tensor_parallel_size": 2}, 16),
        ({"train__batch_size": 16, "train__dynamic_batch_enable": True}, 16),
        ({"train__batch_size": 8, "rollout__n_samples_per_prompt": 16, "rollout__micro_batch_size": 1}, 16),
    ],
)
@pytest.mark.usefixtures("warnings")
def test_a_unit_has_whole_groups_batches_and_micro_batches_of_all_ranks(
    changes: dict[str, Any], unit: int
) -> None:
    args = arguments(**changes)
    counts = unit - 1, unit, 2 * unit - 1, 2 * unit
    assert [kept(count, args) for count in counts] == [0, unit, unit, 2 * unit]


@pytest.mark.parametrize(
    "role",
    [
        {"algo__kl": SimpleNamespace(init_coef=0.1)},
        {"critic__model_name_or_path": "m"},
        {"reward__remote_url": None},
    ],
)
@pytest.mark.usefixtures("warnings")
def test_each_role_counts(role: dict[str, Any]) -> None:
    """Its 3 ranks divide a full step of 96 prompts."""
    args = arguments(rollout__batch_size=96, **role)
    assert [kept(count, args) for count in (383, 384, 767)] == [0, 384, 384]


@pytest.mark.usefixtures("warnings")
def test_nothing_of_a_step_is_trained_if_even_a_full_one_is_no_multiple() -> None:
    args = arguments(train__batch_size=2048)
    assert [kept(count, args) for count in (8, 512, 1016, 1024)] == [0, 0, 0, 1024]


def test_a_run_without_a_step_fails() -> None:
    last_batch.check_trained(1, arguments())
    with pytest.raises(RuntimeError, match=r"needs at least 16 prompts, with 8 samples each"):
        last_batch.check_trained(0, arguments())
    with pytest.raises(RuntimeError, match=r"16 prompts that the dynamic filter keeps"):
        last_batch.check_trained(0, arguments(algo__dynamic_filtering_enable=True))
