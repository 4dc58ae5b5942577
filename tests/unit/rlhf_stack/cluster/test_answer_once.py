"""Calls that Ray repeats are executed once; with Ray itself in tests/patches and tests/cluster."""

import asyncio
import sys
import weakref
from collections import OrderedDict
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from rlhf_stack.cluster import answer_once
from rlhf_stack.cluster.answer_once import AnswersOnce
from rlhf_stack.compat import ray_private


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    fake = MagicMock()
    fake.method = lambda **_: lambda method: method
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(answer_once, "_outcomes", OrderedDict())
    monkeypatch.setattr(answer_once, "_started", OrderedDict())
    return fake


def call(ray: MagicMock, name: str | None) -> None:
    ray.get_runtime_context.return_value.get_task_id.return_value = name


class Rank(AnswersOnce):
    steps = 0

    def train(self) -> int:
        self.steps += 1
        return self.steps

    def train_twice(self) -> list[int]:
        return [self.train(), self.train()]

    def fail(self) -> None:
        self.steps += 1
        raise ValueError(f"after {self.steps} steps")


def test_a_repeated_call_has_the_outcome_of_the_first(ray: MagicMock) -> None:
    rank = Rank()
    for name, expected in (("a", 1), ("a", 1), ("b", 2), ("a", 1), (None, 3), (None, 4)):
        call(ray, name)
        assert rank.train() == expected
    call(ray, "c")
    assert rank.train_twice() == rank.train_twice() == [5, 6]
    call(ray, "d")
    for _ in range(2):
        with pytest.raises(ValueError, match="after 7 steps"):
            rank.fail()


def test_a_failed_call_keeps_no_memory(ray: MagicMock) -> None:
    """Its error is kept, and its frames would keep the tensors of a sync."""

    class Tensor:
        pass

    held: list[weakref.ref[Tensor]] = []

    def send() -> None:
        gathered = Tensor()
        held.append(weakref.ref(gathered))
        raise ValueError(f"not sent: {id(gathered)}")

    call(ray, "a")
    for _ in range(2):
        with pytest.raises(ValueError, match="not sent"):
            answer_once.execute(send, (), {})
    assert held[0]() is None


def test_the_outcomes_of_old_calls_are_dropped(ray: MagicMock) -> None:
    rank = Rank()
    for number in range(answer_once.KEPT + 5):
        call(ray, str(number))
        rank.train()
    assert len(answer_once._outcomes) == answer_once.KEPT


def test_a_repeated_call_of_an_asynchronous_actor_waits_for_the_first(ray: MagicMock) -> None:
    steps: list[int] = []

    async def train() -> int:
        steps.append(len(steps))
        await asyncio.sleep(0)
        return len(steps)

    async def both() -> list[int]:
        call(ray, "a")
        once = answer_once.repeated(train)
        return list(await asyncio.gather(once(), once()))

    assert asyncio.run(both()) == [1, 1]


def test_ray_repeats_only_calls_that_are_executed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    retries = MagicMock()
    monkeypatch.setattr(ray_private, "set_task_retries", retries)
    monkeypatch.setattr(ray_private, "python_class", lambda actor_class: actor_class.python)
    for python in (Rank, object):
        answer_once.repeats_calls(SimpleNamespace(python=python))
    assert retries.call_count == 1


@pytest.mark.parametrize("reports_broken_connections", [True, False], ids=["Ray 2.55.0", "Ray 2.9.3"])
def test_a_broken_connection_is_no_failed_start(
    monkeypatch: pytest.MonkeyPatch, reports_broken_connections: bool
) -> None:
    exceptions = SimpleNamespace(ActorUnavailableError=Exception) if reports_broken_connections else None
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(exceptions=exceptions))
    ready = MagicMock()
    ready.remote.return_value, ready.options.return_value.remote.return_value = "once", "until it is dead"
    started = answer_once.started(SimpleNamespace(__ray_ready__=ready))
    assert started == ("until it is dead" if reports_broken_connections else "once")
    if reports_broken_connections:
        ready.options.assert_called_once_with(max_task_retries=answer_once.WHILE_IT_LIVES)
