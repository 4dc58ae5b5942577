"""The ranges of numbers refuse what trains on nothing, and no default or published script of OpenRLHF."""

import shlex
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rlhf_stack.errors import UserError
from rlhf_stack.openrlhf.run_limits import check_digits, check_values, check_words

PUBLISHED = Path(__file__).parents[4] / "tests" / "cluster" / "published"
INFINITE, NAN = float("inf"), float("nan")


def check(flag: str, value: Any) -> None:
    """Check one flag, as the parser of its release returns it."""
    check_values(SimpleNamespace(**{flag: value}), flat="." not in flag)


@pytest.mark.parametrize(
    "flag",
    [
        *("actor.adam.eps", "actor.adam.weight_decay", "actor.muon.ns_steps", "actor.muon.momentum"),
        *("train.seed", "actor.eps_clip", "algo.advantage.gamma", "algo.advantage.lambd", "algo.kl.target"),
        *("ckpt.max_num", "data.max_images_per_prompt", "rollout.vllm_generate_batch_size", "model.beta"),
        *("l2", "seed", "max_ckpt_num", "ring_head_stride", "kl_target", "eps_clip", "beta"),
    ],
)
def test_a_negative_number_is_refused(flag: str) -> None:
    with pytest.raises(UserError, match=f"--{flag} -1: expected a number"):
        check(flag, -1)


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("logger.logging_steps", 0, "a number from 1 to"),
        ("logging_steps", 0, "a number from 1 to"),
        ("rollout.temperature", 0.0, "a number greater than 0 and at most 100"),
        ("temperature", 0.0, "a number greater than 0 and at most 100"),
        ("rollout.top_p", 0.0, "a number greater than 0 and at most 1"),
        ("ckpt.max_num", 0, "a number from 1 to"),
        ("ckpt.save_steps", 0, "-1, or a number from 1 to"),
        ("eval_steps", -2, "-1, or a number from 1 to"),
        ("ckpt.max_mem", NAN, "a number from 0 to inf"),
        ("ckpt.max_mem", -1.0, "a number from 0 to inf"),
        ("ring_head_stride", 0, "a number from 1 to"),
        ("train.seed", 2**32, "a number from 0 to 4,294,967,295"),
        ("actor.adam.betas", [0.9, 1.0], "a number of at least 0 and less than 1"),
        ("adam_betas", [-1.0, 0.9], "a number of at least 0 and less than 1"),
        ("actor.dual_clip", 1.0, "a number greater than 1"),
        ("reward.clip_range", (-INFINITE, 10), "a number from -1,000,000,000,000"),
        ("actor.lr_scheduler", "foo", "one of linear, cosine"),
        ("lr_scheduler", "foo", "one of linear, cosine"),
        ("critic.lr_scheduler", "", "one of linear, cosine"),
    ],
)
def test_a_number_or_name_without_sense_is_refused(flag: str, value: Any, expected: str) -> None:
    with pytest.raises(UserError) as raised:
        check(flag, value)
    assert str(raised.value).startswith(f"--{flag} ")
    assert f"expected {expected}" in str(raised.value)


@pytest.mark.parametrize(
    ("flag", "datasets", "value", "expected"),
    [
        (
            "data.prompt_probs",
            "data.prompt_dataset",
            "nan,-1",
            "'nan': expected a number greater than 0 and at",
        ),
        (
            "data.prompt_probs",
            "data.prompt_dataset",
            "0.5,\u0661",
            "expected a number greater than 0 and at most",
        ),
        ("data.prompt_probs", "data.prompt_dataset", "1,0", "'0': expected a number greater than 0"),
        ("data.prompt_probs", "data.prompt_dataset", "", "'': expected a number"),
        ("data.dataset_probs", "data.dataset", "0.5,0.25,0.25", "expected as many numbers as datasets (2)"),
        ("data.dataset_probs", "data.dataset", "0.5,0.6", "expected numbers whose sum is 1, and it is 1.1"),
        ("data.dataset_probs", "data.dataset", "0.5,0.500000015", "sum is 1, and it is 1.000000015"),
        ("prompt_data_probs", "prompt_data", "1.0", "expected as many numbers as datasets (2)"),
        ("pretrain_data_probs", "pretrain_data", "1.5,-0.5", "'1.5': expected a number of at least 0 and at"),
        ("dataset_probs", "dataset", "0.5,inf", "'inf': expected a number of at least 0 and at most 1"),
    ],
)
def test_probabilities_that_no_datasets_can_have_are_refused(
    flag: str, datasets: str, value: str, expected: str
) -> None:
    """OpenRLHF reads them when every model is loaded; with a 0, version 0.11.2 reads data for ever."""
    with pytest.raises(UserError) as raised:
        check_values(SimpleNamespace(**{flag: value, datasets: "a.jsonl,b.jsonl"}), flat="." not in flag)
    assert str(raised.value).startswith(f"--{flag} {value}: ")
    assert expected in str(raised.value)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("data.prompt_probs", None), ("data.prompt_probs", "0.4, 0.6"), ("data.prompt_probs", ".7,3e-1")),
        *(("prompt_data_probs", "0.3333333333,0.6666666667"), ("prompt_data_probs", "1.0,0")),
        ("data.prompt_probs", "0.5,0.5000000148"),  # numpy accepts it
    ],
)
def test_probabilities_of_all_datasets_are_accepted(flag: str, value: str | None) -> None:
    datasets = {"data.prompt_dataset": "a,b", "prompt_data": "a,b", "pretrain_data": None}
    check_values(
        SimpleNamespace(**datasets, **{flag: value}, pretrain_data_probs="1.0"), flat="." not in flag
    )


FIVE = "\u0665"  # an Arabic digit, which `float` reads


@pytest.mark.parametrize(
    "text",
    [
        *(FIVE, f".{FIVE}", f"-{FIVE}", f"+.{FIVE}", f" {FIVE} ", f"{FIVE}\n", f"1.{FIVE}", f"1e-{FIVE}"),
        *("1_000", ".5_0", "1e-6_0", "1_0e5", " 1_0", "1.0_1", "1_0."),
    ],
    ids=ascii,
)
@pytest.mark.parametrize("flag", ["", "--actor.adam.lr="])
def test_a_number_that_only_python_reads_is_refused(flag: str, text: str) -> None:
    assert float(text)
    with pytest.raises(UserError, match="expected a number in the digits 0 to 9"):
        check_digits([flag + text], SimpleNamespace(lr=float(text)))


def test_words_that_are_no_such_numbers_are_accepted() -> None:
    words = ["--lr", "1e-6", " 5 ", ".5", "-1", "run_1", "1_a", "_", "1__0", "", "--x=a_1", "1\u00a0"]
    check_digits(words, SimpleNamespace())


def test_two_dashes_are_no_value() -> None:
    """argparse makes an empty list of them, with which the checks of a number ended as a defect."""
    with pytest.raises(UserError, match=r"^--actor\.num_nodes=--: expected a value"):
        check_words(["--actor.num_nodes=--"])
    check_words(["--name=a--", "--"])


@pytest.mark.timeout(60)
def test_the_time_for_a_long_number_does_not_grow_with_its_square() -> None:
    check_digits(["1" * 1_000_000 + "x"], SimpleNamespace())


# The defaults of OpenRLHF 0.11.2 and 0.5.1 that are negative, zero, infinite, or several numbers.
DEFAULTS = {
    **dict.fromkeys(["eval.steps", "ckpt.save_steps", "local_rank", "critic.freezing_steps"], -1),
    **dict.fromkeys(["eval_steps", "save_steps", "freezing_actor_steps"], -1),
    **dict.fromkeys(["data.dataloader_num_workers", "data.max_images_per_prompt", "ds.lora.rank"], 0),
    **dict.fromkeys(["ds.lora.dropout", "actor.aux_loss_coef", "model.nll_loss_coef"], 0),
    **dict.fromkeys(["model.label_smoothing", "actor.adam.weight_decay", "lora_dropout", "l2"], 0.0),
    **dict.fromkeys(["vllm.num_engines", "algo.kl.target", "actor.entropy_coef", "actor.dual_clip"]),
    "ckpt.max_mem": INFINITE,
    "max_ckpt_mem": 1e8,
    "data.max_samples": 10**8,
    "max_samples": 1e8,
    "algo.advantage.is_correction_threshold": [0.5, 5.0],
    "algo.dynamic_filtering_range": (0, 1),
    "reward.clip_range": (-10, 10),
    "reward_clip_range": (-10, 10),
    "actor.adam.betas": (0.9, 0.95),
    "adam_betas": (0.9, 0.95),
    "algo.advantage.gamma": 1,
    "lambd": 0.95,
    "actor.lr_scheduler": "cosine_with_min_lr",
    "lr_scheduler": "cosine_with_min_lr",
    "rollout.top_p": 1.0,
}
MEANT = {"reward.stop_properly_penalty_coef": -0.5, "eval.temperature": 0.0, "actor.entropy_coef": -0.1}


@pytest.mark.parametrize(("flag", "value"), [*DEFAULTS.items(), *MEANT.items()])
def test_defaults_and_values_with_a_meaning_are_accepted(flag: str, value: Any) -> None:
    check(flag, value)


@pytest.mark.parametrize("release", ["0.11.2", "0.5.1"])
def test_no_published_script_is_refused(release: str) -> None:
    text = (PUBLISHED / f"openrlhf-{release}.toml").read_text(encoding="utf-8")
    for command in tomllib.loads(text)["command"]:
        for flag, value in numbers_of(shlex.split(command["flags"].replace("\n", " "))):
            check_values(SimpleNamespace(**{flag: value}), flat=release == "0.5.1")


def numbers_of(words: list[str]) -> list[tuple[str, float]]:
    """The flags of a command line with the numbers that follow them."""
    found, flag = [], ""
    for word in words:
        try:
            found.append((flag, float(word)))
        except ValueError:
            flag = word.removeprefix("--")
    return found
