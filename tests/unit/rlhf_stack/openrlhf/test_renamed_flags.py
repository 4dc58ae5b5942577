"""The successors of flags that a release replaced."""

import pytest
from rlhf_stack.openrlhf.renamed_flags import hint

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
