"""Assignment of prompts, compared with exhaustive search and with splits by number."""

import itertools
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from rlhf_stack.config import env_vars
from rlhf_stack.engine import request_balancer
from rlhf_stack.telemetry import events

WORK = st.lists(st.integers(1, 2000), max_size=40)
BUSY = st.lists(st.integers(0, 5000), min_size=1, max_size=6)


@given(WORK, BUSY)
def test_no_engine_is_busy_for_longer_than_with_a_split_by_number(work: list[int], busy: list[int]) -> None:
    found = request_balancer.assign(work, busy)
    assert len(found) == len(work)
    size = -(-len(work) // len(busy))
    for other in (
        [prompt // size for prompt in range(len(work))],
        [prompt % len(busy) for prompt in range(len(work))],
    ):
        assert request_balancer.makespan(work, busy, found) <= request_balancer.makespan(work, busy, other)


@given(WORK, BUSY)
def test_longest_first_is_within_its_bound(work: list[int], busy: list[int]) -> None:
    found = request_balancer.makespan(work, busy, request_balancer.assign(work, busy))
    engines = len(busy)
    assert found <= max(*busy, (sum(work) + sum(busy)) / engines + max(work, default=0))


@hypothesis_settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
@example([30, 30, 30, 40, 40, 50, 50], 3)
def test_idle_engines_finish_within_four_thirds_of_the_optimum(work: list[int], engines: int) -> None:
    idle = [0] * engines
    best = min(
        request_balancer.makespan(work, idle, (0, *rest))  # idle engines are alike: the first takes the first
        for rest in itertools.product(range(engines), repeat=len(work) - 1)
    )
    found = request_balancer.makespan(work, idle, request_balancer.assign(work, idle))
    assert found * 3 * engines <= best * (4 * engines - 1)  # 4/3 - 1/(3 engines), without rounding


@given(st.lists(st.lists(st.integers(0, 9), max_size=30), max_size=30), st.integers(0, 64), st.integers(1, 5))
def test_each_prompt_is_in_one_part_and_its_answer_is_in_place(
    prompts: list[list[int]], answer: int, engines: int
) -> None:
    shares = request_balancer.split_prompts(prompts, answer, engines)
    assert len(shares) == engines
    assert sorted(index for share in shares for index in share) == list(range(len(prompts)))
    answers = [[prompts[index] for index in share] for share in shares if share]
    assert request_balancer.merge_answers(shares, answers) == prompts


def test_assignment_is_deterministic() -> None:
    choose = random.Random(0)  # noqa: S311
    prompts = [[0] * choose.randrange(1, 50) for _ in range(64)]
    assert request_balancer.split_prompts(prompts, 16, 3) == request_balancer.split_prompts(
        list(prompts), 16, 3
    )


def tokenizer(texts: list[str], add_special_tokens: bool) -> dict[str, Any]:
    assert not add_special_tokens
    return {"input_ids": [list(text) for text in texts]}


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Two engines, of which the first has 1000 unfinished tokens."""
    ray = MagicMock()
    ray.get.side_effect = lambda references, **_: references
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delenv(env_vars.REPEATABLE, raising=False)
    return [
        SimpleNamespace(unfinished_work=SimpleNamespace(remote=lambda left=left: left)) for left in (1000, 0)
    ]


class Processor:
    """transformers' processor of a model with images, whose first argument is the images."""

    image_processor = None
    tokenizer = staticmethod(tokenizer)

    def __call__(self, images: object = None, text: object = None, **_: object) -> dict[str, Any]:
        raise ValueError("Incorrect image source")


def assigned(
    engines: list[Any], prompts: list[str], tokens: int | None, limit: int = 128, samples: int = 1
) -> list[int]:
    parameters = SimpleNamespace(max_tokens=tokens)
    return request_balancer.assign_prompts(engines, prompts, tokenizer, parameters, limit, samples)


@pytest.mark.parametrize(("repeatable", "expected"), [("", [1, 11]), ("1", [6, 6])])
def test_busy_engine_gets_less_unless_the_run_is_repeatable(
    engines: list[Any], monkeypatch: pytest.MonkeyPatch, repeatable: str, expected: list[int]
) -> None:
    monkeypatch.setenv(env_vars.REPEATABLE, repeatable)
    found = assigned(engines, ["x" * 10] * 12, 90)
    assert [found.count(engine) for engine in (0, 1)] == expected


def test_unlimited_answer_may_fill_the_context(engines: list[Any]) -> None:
    found = assigned(engines, ["x", "x" * 99], None, limit=100, samples=4)
    assert found == [1, 1], "each is 4 times 100 tokens at most, and the first engine has 1000"


@pytest.mark.parametrize("of", [tokenizer, Processor()], ids=["text", "images"])
def test_prompts_may_have_images_or_be_an_agents_objects(engines: list[Any], of: Any) -> None:
    parameters = SimpleNamespace(max_tokens=9)
    prompts = ["x" * 500, {"task": 3}, ["y"]]
    found = request_balancer.assign_prompts(engines, prompts, of, parameters, 999, 1)
    assert found == [1, 1, 1], "the first engine has 1000 tokens"


@pytest.mark.parametrize(
    "begin",
    [lambda engines: assigned(engines, ["x"], 9), lambda _: request_balancer.split_prompts([[1, 2]], 9, 1)],
    ids=["0.11", "0.5"],
)
def test_beginning_of_generation_is_recorded(
    engines: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: Callable[[list[Any]], object]
) -> None:
    monkeypatch.setenv(env_vars.EVENTS, str(tmp_path))
    begin(engines)
    (event,) = events.read(tmp_path)
    assert (event["event"], event["name"]) == ("begins", "generation")
