"""Reproducible rollouts."""

import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlhf_stack.compat import determinism
from rlhf_stack.config import env_vars
from rlhf_stack.engine.actor import AsyncEngineMixin

PROMPTS = st.lists(st.lists(st.integers(0, 512), max_size=4), max_size=8)


@given(st.integers(0, 2**31), PROMPTS)
def test_seeds_follow_from_the_engine_and_its_requests(seed: int, prompts: list[list[int]]) -> None:
    """Seeds are equal in another run and distinct within a run."""
    first, second = determinism.RequestSeeds(seed), determinism.RequestSeeds(seed)
    seeds = [first.next(prompt) for prompt in prompts]
    assert [second.next(prompt) for prompt in prompts] == seeds
    assert len(set(seeds)) == len(seeds)


@given(PROMPTS.filter(lambda prompts: len(prompts) > 1))
def test_seeds_do_not_depend_on_when_other_prompts_arrive(prompts: list[list[int]]) -> None:
    """Seeds depend only on how often the same prompt was requested before."""
    forward, backward = determinism.RequestSeeds(1), determinism.RequestSeeds(1)
    one = sorted((prompt, forward.next(prompt)) for prompt in prompts)
    other = sorted((prompt, backward.next(prompt)) for prompt in reversed(prompts))
    assert one == other


def engine() -> AsyncEngineMixin:
    """An engine actor of seed 3."""
    made = AsyncEngineMixin()
    made.kwargs = {"seed": 3}
    return made


def test_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters are unchanged."""
    monkeypatch.delenv(env_vars.REPEATABLE, raising=False)
    assert engine().request_parameters([1], types.SimpleNamespace(seed=None)).seed is None


def test_seed_of_the_user_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent may sample with its own seed."""
    monkeypatch.setenv(env_vars.REPEATABLE, "1")
    assert engine().request_parameters([1], types.SimpleNamespace(seed=5)).seed == 5
    assert engine().request_parameters([1], types.SimpleNamespace(seed=None)).seed is not None


def fake_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray whose last reference is always ready first."""

    def wait(
        references: list[str], num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[str], list[str]]:
        del num_returns, timeout
        return references[-1:], references[:-1]

    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(wait=wait))


def test_answers_are_taken_in_the_order_of_their_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order does not depend on which answer is ready first."""
    fake_ray(monkeypatch)
    monkeypatch.setenv(env_vars.REPEATABLE, "1")
    assert determinism.wait_for_answer(["a", "b", "c"]) == (["a"], ["b", "c"])
    monkeypatch.setenv(env_vars.REPEATABLE, "0")
    assert determinism.wait_for_answer(["a", "b", "c"]) == (["c"], ["a", "b"])
