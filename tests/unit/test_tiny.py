"""What needs no torch: the prompts, the reward and the arguments of the tiny run."""

from pathlib import Path

import pytest
from rlhf_stack import tiny
from rlhf_stack.digit_reward import share_of_digits


def value(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_the_same_seed_gives_the_same_prompts() -> None:
    assert list(tiny.prompts(3, 20)) == list(tiny.prompts(3, 20)) != list(tiny.prompts(4, 20))


@pytest.mark.parametrize(
    ("response", "expected"), [("", 0), ("abc", 0), ("12", 1), ("1a<eos>", 0.5), ("12<eos><pad><pad>", 1)]
)
def test_the_reward_is_the_share_of_digits(response: str, expected: float) -> None:
    assert share_of_digits(response) == expected


@pytest.mark.parametrize("layout", list(tiny.LAYOUTS))
def test_a_step_is_one_rollout_and_there_are_as_many_as_asked(layout: str) -> None:
    arguments = tiny.train_arguments(layout, Path("/somewhere"), steps=5, seed=1)
    rollout = int(value(arguments, "--rollout.batch_size")) * int(
        value(arguments, "--rollout.n_samples_per_prompt")
    )
    assert int(value(arguments, "--train.batch_size")) == rollout
    assert int(value(arguments, "--data.max_samples")) == 5 * int(value(arguments, "--rollout.batch_size"))
    assert value(arguments, "--train.seed") == "1"


@pytest.mark.parametrize("layout", list(tiny.LAYOUTS))
def test_a_flag_stands_once_and_engines_are_tensor_parallel(layout: str) -> None:
    arguments = tiny.train_arguments(layout, Path("/somewhere"), steps=5, seed=1)
    flags = [argument for argument in arguments if argument.startswith("--")]
    assert len(flags) == len(set(flags))
    assert value(arguments, "--vllm.tensor_parallel_size") == "2"
