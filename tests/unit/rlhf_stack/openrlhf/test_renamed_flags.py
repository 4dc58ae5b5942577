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
    "--actor.num_nodes",
    "--actor.model_name_or_path",
    "--algo.kl.init_coef",
    "--ds.zero_stage",
    "--eval.temperature",
    "--rollout.temperature",
    "--train.micro_batch_size",
    "--rollout.micro_batch_size",
)


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
        ("--ds.zero_stag 3", ["did you mean '--ds.zero_stage'?"]),
        ("--bogus 2 x--y", []),
        (f"{ENABLE} --zero_stage 3", [hint(ENABLE), "instead of --zero_stage use --ds.zero_stage"]),
    ],
)
def test_flat_flags_name_their_nested_successors(unrecognized: str, expected: list[str]) -> None:
    assert hints(f"unrecognized arguments: {unrecognized}", OPTIONS) == expected
