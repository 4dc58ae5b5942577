"""rlhf_stack.demo: the prompts, the reward and the arguments of the tiny run, without torch."""

from pathlib import Path

import pytest
from rlhf_stack.demo import tiny_model, tiny_run
from rlhf_stack.demo.digit_reward import share_of_digits


def value(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_the_same_seed_gives_the_same_prompts() -> None:
    assert (
        list(tiny_model.prompts(3, 20)) == list(tiny_model.prompts(3, 20)) != list(tiny_model.prompts(4, 20))
    )


@pytest.mark.parametrize(
    ("response", "expected"), [("", 0), ("abc", 0), ("12", 1), ("1a<eos>", 0.5), ("12<eos><pad><pad>", 1)]
)
def test_the_reward_is_the_share_of_digits(response: str, expected: float) -> None:
    assert share_of_digits(response) == expected


CALLS = [
    ("0.11.2", "separate"),
    ("0.11.2", "hybrid"),
    ("0.5.1+stack.1", "separate"),
    ("0.5.1+stack.1", "spread"),
]
NAMES = {  # of the same thing on both command lines
    "0.11.2": ("rollout.batch_size", "rollout.n_samples_per_prompt", "train.batch_size", "data.max_samples"),
    "0.5.1+stack.1": ("rollout_batch_size", "n_samples_per_prompt", "train_batch_size", "max_samples"),
}


@pytest.mark.parametrize(("release", "layout"), CALLS)
def test_a_step_is_one_rollout_and_the_number_of_steps_is_as_requested(release: str, layout: str) -> None:
    arguments = tiny_run.train_arguments(layout, Path("/somewhere"), steps=5, seed=1, release=release)
    prompts, samples, batch, total = (int(value(arguments, f"--{name}")) for name in NAMES[release])
    assert batch == prompts * samples
    assert total == 5 * prompts


@pytest.mark.parametrize(("release", "layout"), CALLS)
def test_every_flag_occurs_once(release: str, layout: str) -> None:
    arguments = tiny_run.train_arguments(layout, Path("/somewhere"), steps=5, seed=1, release=release)
    flags = [argument for argument in arguments if argument.startswith("--")]
    assert len(flags) == len(set(flags))


@pytest.mark.parametrize("layout", ["separate", "hybrid"])
def test_engines_are_tensor_parallel_where_vllm_can(layout: str) -> None:
    arguments = tiny_run.train_arguments(layout, Path("/somewhere"), steps=5, seed=1, release="0.11.2")
    assert value(arguments, "--vllm.tensor_parallel_size") == "2"


@pytest.mark.parametrize("layout", ["separate", "spread"])
def test_an_older_openrlhf_trains_all_four_models(layout: str) -> None:
    arguments = tiny_run.train_arguments(layout, Path("/somewhere"), steps=5, seed=1, release="0.5.1")
    assert value(arguments, "--advantage_estimator") == "gae", "it has a critic"
    assert value(arguments, "--reward_pretrain") == "/somewhere/reward"
    gpus = [
        int(value(arguments, f"--{role}_num_nodes")) * int(value(arguments, f"--{role}_num_gpus_per_node"))
        for role in ("actor", "critic")
    ]
    assert sum(gpus) + int(value(arguments, "--vllm_num_engines")) == 4, "two nodes with two GPUs each"


def test_a_layout_that_this_openrlhf_lacks_is_refused_with_the_available_ones() -> None:
    with pytest.raises(ValueError, match=r"layout hybrid: this OpenRLHF \(0\.5\.1\) has separate, spread"):
        tiny_run.train_arguments("hybrid", Path("/somewhere"), steps=5, seed=1, release="0.5.1")
