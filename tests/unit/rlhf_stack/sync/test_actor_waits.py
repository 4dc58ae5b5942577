"""Waits for engines and trainer ranks; waits for lost Ray actors are in tests/cluster."""

import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from rlhf_stack import sync
from rlhf_stack.cluster import actor_registry
from rlhf_stack.compat import ray_private
from rlhf_stack.config import env_vars
from rlhf_stack.sync import actor_waits


class GetTimeoutError(Exception):
    """A substitute for ray.exceptions.GetTimeoutError."""


class Dead(Exception):
    """A substitute for ray.exceptions.RayActorError."""

    actor_init_failed = False


class Unavailable(Dead):
    """A substitute for ray.exceptions.ActorUnavailableError."""


class Failed(Exception):
    """A substitute for ray.exceptions.RayTaskError."""

    @property
    def cause(self) -> str:
        return str(self)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    fake = MagicMock()
    fake.exceptions.GetTimeoutError = GetTimeoutError
    fake.exceptions.RayActorError, fake.exceptions.RayTaskError = Dead, Failed
    fake.exceptions.ActorUnavailableError = Unavailable
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


def test_a_wait_returns_what_ray_returns(ray: MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "7")
    ray.get.return_value = ["a", "b"]
    assert sync.wait_for_engine_results(["first", "second"], "something") == ["a", "b"]
    ray.get.assert_called_once_with(["first", "second"], timeout=7.0)


def test_a_wait_past_its_deadline_names_the_operation_and_the_engine(
    ray: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "7")
    monkeypatch.setattr(actor_registry, "describe_callee", {"second": "engine 1 on node-b"}.__getitem__)
    ray.get.side_effect = GetTimeoutError
    ray.wait.return_value = (["first"], ["second"])
    expected = (
        r"waited 7 s for loading w; engines \[1\] of 2 did not answer \(deadline: RLHF_STACK_SYNC_TIMEOUT\): "
        r"engine 1 on node-b$"
    )
    with pytest.raises(sync.SyncError, match=expected):
        sync.wait_for_engine_results(["first", "second"], "loading w")


def engine(answer: str) -> SimpleNamespace:
    ready = SimpleNamespace(remote=lambda: answer)
    ready.options = lambda max_task_retries: ready
    return SimpleNamespace(__ray_ready__=ready)


def test_the_sync_waits_for_the_start_of_engines(ray: MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.ENGINE_TIMEOUT, "9")
    sync.wait_for_engine_start([engine("up")])
    ray.get.assert_called_once_with(["up"], timeout=9.0)


def test_a_dead_engines_own_error_is_raised(ray: MagicMock) -> None:
    ray.get.side_effect = RuntimeError("the engine's own error")
    with pytest.raises(RuntimeError, match="the engine's own error"):
        sync.wait_for_engine_start([engine("dead")])


class Engine:
    """An engine actor with a sequence of answers to queries for its sync error."""

    def __init__(self, *answers: object) -> None:
        self._answers = list(answers)
        self.sync_error = SimpleNamespace(remote=lambda: ("answer", self._answers.pop(0)))


def simulated(ray: MagicMock, ready: dict[str, int]) -> None:
    """Simulate a Ray in which a trainer rank is ready after ``ready`` waits, and engines answer at once."""
    remaining = dict(ready)

    def wait(references: list[object], **_: object) -> tuple[list[object], list[object]]:
        done = []
        for reference in references:
            if isinstance(reference, str):
                remaining[reference] -= 1
            if not isinstance(reference, str) or remaining[reference] <= 0:
                done.append(reference)
        return done, [reference for reference in references if reference not in done]

    def get(reference: object, **_: object) -> object:
        if isinstance(reference, list):
            return [get(one) for one in reference]
        value = reference[1] if isinstance(reference, tuple) else f"{reference} done"
        if isinstance(value, Exception):
            raise value
        return value

    ray.wait.side_effect, ray.get.side_effect = wait, get


def test_the_wait_ends_when_all_trainer_ranks_are_done(ray: MagicMock) -> None:
    simulated(ray, {"rank 0": 3, "rank 1": 1})
    assert sync.wait_for_sync(["rank 0", "rank 1"], [Engine(None, None, None)]) == [
        "rank 0 done",
        "rank 1 done",
    ]


def test_an_engines_error_ends_the_wait_for_a_stopped_trainer(ray: MagicMock) -> None:
    simulated(ray, {"rank 0": 1000})
    with pytest.raises(sync.SyncError, match="bucket 3: rank 0 does not answer"):
        sync.wait_for_sync(["rank 0"], [Engine(None, None), Engine(None, "bucket 3: rank 0 does not answer")])


def test_a_dead_engine_ends_the_wait(ray: MagicMock) -> None:
    simulated(ray, {"rank 0": 1000})
    with pytest.raises(sync.SyncError, match="an actor is dead: killed"):
        sync.wait_for_sync(["rank 0"], [Engine(Dead("killed"))])


@pytest.mark.parametrize(("state", "ends"), [("ALIVE", False), ("RESTARTING", True)])
def test_a_query_whose_connection_broke_is_repeated_while_the_engine_lives(
    ray: MagicMock, monkeypatch: pytest.MonkeyPatch, state: str, ends: bool
) -> None:
    monkeypatch.setattr(ray_private, "handle_state", lambda _: state)
    simulated(ray, {"rank 0": 3})
    engines = [Engine(Unavailable("a broken connection"), None, None)]
    if ends:
        with pytest.raises(sync.SyncError, match=r"cannot be reached.*: a broken connection"):
            sync.wait_for_sync(["rank 0"], engines)
    else:
        assert sync.wait_for_sync(["rank 0"], engines) == ["rank 0 done"]


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (
            Failed("the engine is asleep\nand more"),
            (sync.SyncError, "^engine 1 on node-b: the engine is asleep$"),
        ),
        (Dead("killed"), (actor_registry.PeerError, "a call to an engine: an actor is dead: killed")),
    ],
)
def test_the_error_of_a_call_to_an_engine_is_raised_while_others_wait(
    ray: MagicMock,
    monkeypatch: pytest.MonkeyPatch,
    outcome: Exception,
    expected: tuple[type[Exception], str],
) -> None:
    simulated(ray, {"call 0": 9, "call 2": 1})
    monkeypatch.setattr(actor_registry, "describe_callee", lambda _: "engine 1 on node-b")
    actor_waits.raise_engine_error(["call 0", "call 2"])
    with pytest.raises(expected[0], match=expected[1]):
        actor_waits.raise_engine_error(["call 0", (1, outcome)])


def test_a_dead_trainer_is_an_error_with_an_engines_report(
    ray: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_waits, "POLL_SECONDS", 0.01)
    simulated(ray, {"rank 0": 1000})
    references = ["rank 0", (1, Dead("killed"))]
    with pytest.raises(
        actor_registry.PeerError, match=r"^an actor is dead: killed; bucket 3: rank 1 does not answer$"
    ):
        sync.wait_for_sync(references, [Engine(None, None, "bucket 3: rank 1 does not answer")])


def test_queries_about_a_dead_trainer_end(ray: MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "0.04")
    monkeypatch.setattr(actor_waits, "POLL_SECONDS", 0.01)
    simulated(ray, {"rank 0": 1000})
    with pytest.raises(actor_registry.PeerError, match=r"^an actor is dead: killed$"):
        sync.wait_for_sync([(1, Dead("killed"))], [Engine(*[None] * 100)])


def test_the_error_of_a_trainers_task_is_unchanged(ray: MagicMock) -> None:
    simulated(ray, {"rank 0": 1000})
    with pytest.raises(Failed, match="bucket 3"):
        sync.wait_for_sync([(1, Failed("bucket 3"))], [Engine(None)])


def test_trainers_without_engines_are_waited_for(ray: MagicMock) -> None:
    simulated(ray, {"rank 0": 3})
    assert sync.wait_for_sync(["rank 0"], None) == ["rank 0 done"]
