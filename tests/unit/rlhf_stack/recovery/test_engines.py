"""rlhf_stack.recovery.engines: the command line with fewer engines."""

from types import SimpleNamespace
from typing import Any

import pytest
from rlhf_stack.placement.model import Engines
from rlhf_stack.recovery.engines import with_fewer_engines


def run(count: int, shares: str | None = None) -> Any:
    return SimpleNamespace(request=SimpleNamespace(engines=Engines(count, 2, shares)))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["x", "--vllm.num_engines", "3", "y"], ["x", "--vllm.num_engines", "2", "y"]),
        (["--vllm_num_engines=3"], ["--vllm_num_engines=2"]),
    ],
)
def test_engines_are_left_out_one_after_the_other(words: list[str], expected: list[str]) -> None:
    first, second = with_fewer_engines(words, run(3))
    assert first == expected
    assert second == [word.replace("2", "1") for word in expected]


def test_the_last_engine_and_engines_on_the_gpus_of_the_trainer_stay() -> None:
    words = ["--vllm.num_engines", "1"]
    assert list(with_fewer_engines(words, run(1))) == []
    assert list(with_fewer_engines(words, run(4, shares="actor"))) == []
