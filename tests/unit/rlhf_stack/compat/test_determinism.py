"""Reproducible rollouts."""

import copy
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
    assert engine().request_parameters([1], types.SimpleNamespace(seed=None, extra_args=None)).seed is None


def test_seed_of_the_user_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent may sample with its own seed."""
    monkeypatch.setenv(env_vars.REPEATABLE, "1")
    assert engine().request_parameters([1], types.SimpleNamespace(seed=5)).seed == 5
    assert (
        engine().request_parameters([1], types.SimpleNamespace(seed=None, extra_args=None)).seed is not None
    )


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


@given(PROMPTS)
def test_seeds_of_the_trainer_do_not_depend_on_the_engine(prompts: list[list[int]]) -> None:
    """Another engine, or the same one after a restart, samples a moved prompt in the same way."""
    one, other = determinism.RequestSeeds(1), determinism.RequestSeeds(2)
    for prompt in prompts:
        one.next(prompt)
    bases = list(enumerate(prompts))
    assert [one.next(prompt, base) for base, prompt in bases] == [
        other.next(prompt, base) for base, prompt in reversed(bases)
    ][::-1]


def test_an_engine_uses_the_seed_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.REPEATABLE, "1")
    given = {determinism.BASE: 7}
    seeds = [
        engine().request_parameters([1], types.SimpleNamespace(seed=None, extra_args=extra)).seed
        for extra in (given, given, None)
    ]
    assert seeds[0] == seeds[1] != seeds[2]


def test_an_engine_that_answered_a_prompt_gives_it_the_same_seed_again(
    rollout: determinism.Rollout,
) -> None:
    """Its answer was lost with the connection, and the prompt is sent to it again."""
    one, sent, seeds = engine(), types.SimpleNamespace(seed=None, extra_args=None), []
    sent = determinism.seed_prompt("a", sent)
    for _ in range(2):
        sent = determinism.next_attempt(sent)
        turns = ([1], [1], [1, 2])
        seeds.append([one.request_parameters(turn, copy.copy(sent)).seed for turn in turns])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3


@pytest.fixture
def rollout(monkeypatch: pytest.MonkeyPatch) -> determinism.Rollout:
    monkeypatch.setenv(env_vars.REPEATABLE, "1")
    made = determinism.Rollout()
    monkeypatch.setattr(determinism, "rollout", made)
    return made


def bases(count: int) -> list[int]:
    """The bases that the next ``count`` requests with one prompt have."""
    parameters = types.SimpleNamespace(seed=None, extra_args={"own": 1})
    seeded = [determinism.seed_prompt("a", parameters).extra_args for _ in range(count)]
    assert parameters.extra_args == {"own": 1}, "the caller's parameters are unchanged"
    assert all(extra["own"] == 1 for extra in seeded)
    return [extra[determinism.BASE] for extra in seeded]


def test_a_continued_run_has_the_seeds_of_the_undisturbed_one(rollout: determinism.Rollout) -> None:
    undisturbed = []
    for step in range(1, 4):
        undisturbed.append(bases(2))
        rollout.ended(step)
    assert len({base for step in undisturbed for base in step}) == 6

    @determinism.continues_from
    def load() -> dict[str, int]:
        return {"global_step": 2}

    determinism.rollout = determinism.Rollout()
    assert load() == {"global_step": 2}
    assert bases(2) == undisturbed[2]
    determinism.rollout.seed = 1
    assert load() == {"global_step": 2}
    assert bases(2) != undisturbed[2], "another run"


@pytest.mark.parametrize(("finished", "ahead", "episode"), [(False, 1, 1), (True, 1, 2), (True, 4, 1)])
def test_a_run_whose_loader_was_drained_continues_with_the_next_episode(
    finished: bool, ahead: int, episode: int, rollout: determinism.Rollout
) -> None:
    """With the loader's state, which has the order of that episode: see tests/image/test_prompt_loader.py.

    Not if more than a batch was generated at a time: the rest of the drained episode was not trained.
    """
    del rollout
    loader = {"_iterator_finished": finished, "_num_yielded": 10}

    @determinism.continues_from
    def load(_: object) -> dict[str, object]:
        return {"episode": 1, "global_step": 6, "data_loader_state_dict": loader}

    batches = types.SimpleNamespace(batch_size=4, vllm_generate_batch_size=4 * ahead)
    trainer = types.SimpleNamespace(args=types.SimpleNamespace(rollout=batches))
    assert load(trainer) == {"episode": episode, "global_step": 6, "data_loader_state_dict": loader}


def test_the_batches_of_a_rank_have_the_seeds_of_their_steps(rollout: determinism.Rollout) -> None:
    """Also those of a run of OpenRLHF 0.5 that was continued after step 2."""

    def batches(first: int) -> list[int | None]:
        seeds = []
        for step in range(first, 5):
            determinism.begin_rollout(step)
            seeds += [determinism.rollout_seed(7, rank) for rank in (0, 0, 1)]
        return seeds

    undisturbed = batches(1)
    assert None not in undisturbed
    assert len(set(undisturbed)) == 12
    determinism.rollout = determinism.Rollout()
    assert batches(3) == undisturbed[6:]


def test_parameters_have_no_base_otherwise(
    rollout: determinism.Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    del rollout
    own = types.SimpleNamespace(seed=5, extra_args=None)
    assert determinism.seed_prompt("a", own) is own
    monkeypatch.delenv(env_vars.REPEATABLE)
    other = types.SimpleNamespace(seed=None, extra_args=None)
    assert determinism.seed_prompt("a", other) is other
    assert determinism.rollout_seed(7, 0) is None


class Optimizer:
    """An optimiser before its first step."""

    state: dict[str, object] = {}  # noqa: RUF012


def test_the_order_of_training_follows_from_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a rank drew before, it trains equal samples in the same order."""
    seeds: list[int] = []
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(manual_seed=seeds.append))

    def buffer(*tokens: int) -> types.SimpleNamespace:
        items = [types.SimpleNamespace(sequences=types.SimpleNamespace(tolist=lambda: list(tokens)))]
        return types.SimpleNamespace(items=items)

    monkeypatch.setenv(env_vars.REPEATABLE, "1")
    for tokens in ((1, 2), (1, 2), (1, 3)):
        determinism.seed_training(buffer(*tokens), Optimizer())
    assert seeds[0] == seeds[1] != seeds[2]
    monkeypatch.delenv(env_vars.REPEATABLE)
    determinism.seed_training(buffer(1), Optimizer())
    assert len(seeds) == 3
