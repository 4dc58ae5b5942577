"""Restarts of lost engines and moves of their prompts; real engines are in tests/cluster."""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from rlhf_stack.cleanup import process_table, stale_resources, terminate
from rlhf_stack.cleanup.process_table import Process
from rlhf_stack.cluster import actor_registry, gcs_kv, run_metrics
from rlhf_stack.cluster.actor_registry import PeerError
from rlhf_stack.compat import ray_private
from rlhf_stack.config import env_vars
from rlhf_stack.engine import prompt_requests, recipes, request_balancer, restarted, restarts, roster, startup
from rlhf_stack.engine.startup import StartError
from rlhf_stack.sync import SyncError, actor_trainer
from rlhf_stack.telemetry import events

pytestmark = pytest.mark.usefixtures("ray", "states")


class LostError(Exception):
    """Ray's error for an actor that is dead."""


class UnavailableError(LostError):
    """Ray's error for an actor that is restarted, or whose connection broke."""


class LostAnswerError(Exception):
    """Ray's error for an object whose node was lost; its subclasses have other causes too."""


class UnrecoverableError(LostAnswerError):
    """Ray's error for such an object that it cannot compute again."""


class OwnerDiedError(LostAnswerError):
    """Ray's error for an object whose owner, the trainer, is dead."""


class Reference:
    """A reference to ``result``, which can be a key."""

    def __init__(self, result: Any) -> None:
        self.result = result


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    def get(reference: Any, timeout: float | None = None) -> Any:
        if isinstance(reference, list):
            return [get(one) for one in reference]
        if isinstance(reference.result, Exception):
            raise reference.result
        return reference.result

    fake = MagicMock()
    fake.get.side_effect = get
    fake.wait.side_effect = lambda references, **_: (references, [])
    fake.exceptions = SimpleNamespace(
        RayActorError=LostError,
        ActorUnavailableError=UnavailableError,
        GetTimeoutError=TimeoutError,
        ObjectLostError=LostAnswerError,
        ObjectFetchTimedOutError=UnrecoverableError,
        ObjectReconstructionFailedError=UnrecoverableError,
    )
    fake.get_runtime_context.return_value.get_job_id.return_value = "job"
    monkeypatch.setattr(actor_trainer, "forms_weight_group", lambda method: method)
    monkeypatch.setattr(prompt_requests, "_requests", {})
    monkeypatch.setattr(actor_registry, "describe_lost_actor", str)
    monkeypatch.setattr(restarts, "_senders", [])
    monkeypatch.setattr(startup, "_last_steps", lambda _: [])
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    stored: dict[str, dict[str, Any]] = {}
    monkeypatch.setattr(gcs_kv, "put_record", lambda key, record, *_: stored.update({key: record}))
    monkeypatch.setattr(
        gcs_kv, "list_records", lambda key, *_: [stored[one] for one in stored if one.startswith(key)]
    )
    monkeypatch.setattr(run_metrics, "publish", MagicMock())
    monkeypatch.setattr(time, "sleep", MagicMock())
    monkeypatch.setattr(restarted, "_pending", [])
    return stored


def engine(**results: Any) -> SimpleNamespace:
    return SimpleNamespace(**{name: remote(result) for name, result in results.items()})


def remote(result: Any) -> SimpleNamespace:
    method = SimpleNamespace(remote=lambda *_, **__: Reference(result))
    method.options = lambda **_: method
    return method


def requested(engines: list[Any], prompt: str) -> Any:
    """The reference to the answer to ``prompt``, which was sent to the first engine."""
    parameters = SimpleNamespace(max_tokens=4, extra_args=None)
    given = {"hf_tokenizer": _tokens, "sampling_params": parameters, "max_length": 64, "num_samples": 1}
    return prompt_requests.request_answers(engines, 0, prompt=prompt, **given)


def rank_0(engines: Sequence[Any], by_ray: bool = False) -> SimpleNamespace:
    """The trainer's rank that forms the weight-sync group."""
    arguments = SimpleNamespace(vllm=SimpleNamespace(sync_with_ray=by_ray))
    return SimpleNamespace(vllm_engines=list(engines), strategy=SimpleNamespace(args=arguments))


@pytest.mark.parametrize(
    ("name", "read", "default", "least"),
    [
        (env_vars.ENGINE_RESTARTS, env_vars.engine_restarts, 0, 0),
        (env_vars.MIN_ENGINES, env_vars.min_engines, 1, 1),
    ],
)
def test_whole_numbers_are_validated(
    monkeypatch: pytest.MonkeyPatch, name: str, read: Callable[[], int], default: int, least: int
) -> None:
    for value, expected in (("", default), (str(least), least), ("12", 12)):
        monkeypatch.setenv(name, value)
        assert read() == expected
    for value in (str(least - 1), "1.5", "many", "٣", "1000"):
        monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=name):
            read()


def test_the_pause_before_a_restart_doubles_up_to_a_limit() -> None:
    assert [restarted.backoff(number) for number in (1, 2, 3, 4, 50)] == [0, 5, 10, 20, 300]


def test_a_restarted_engine_lacks_weights_until_it_has_received_them(
    records: dict[str, dict[str, Any]],
) -> None:
    assert not restarted.needs_weights()
    restarted.begin("job", 1)
    assert restarted.needs_weights()
    restarted.weights_received()
    assert not restarted.needs_weights()
    restarted.begin("job", 1)
    restarted.begin("job", 0)
    restarted.begin("other", 0)
    assert restarted.counts("job") == {0: 1, 1: 2}
    assert records["restarts/job/1"] == {"engine": 1, "restarts": 2}


def test_a_restart_sets_the_metrics_of_restarts(records: dict[str, dict[str, Any]]) -> None:
    restarted.begin("job", 1)
    restarted.weights_received()
    published = [call.args[0] for call in run_metrics.publish.call_args_list]  # type: ignore[attr-defined]
    assert {key for values in published for key in values} == {(n, "1") for n in run_metrics.RESTART_METRICS}
    assert published[0] == {("rlhf_stack_engine_restarts", "1"): 1}


@pytest.mark.parametrize(("detected", "seconds"), [(100.0, 60.0), (130.0, 35.0), (None, 35.0)])
def test_an_outage_is_measured_from_the_detection_of_the_loss(
    records: dict[str, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    detected: float | None,
    seconds: float,
) -> None:
    """The new process begins at 125: its actor was created before, or the loss was noticed late."""
    now, emitted = [0.0], MagicMock()
    monkeypatch.setattr(time, "time", lambda: now[0])
    monkeypatch.setattr(events, "emit", emitted)
    records["outages/job/12"] = {"engine": 12, "since": 1.0}
    times: list[tuple[float, Callable[[], None]]] = [
        (125.0, lambda: restarted.begin("job", 1)),
        (160.0, restarted.weights_received),
    ]
    if detected is not None:
        times += [(detected, lambda: restarted.note_loss(1)), (detected + 2, lambda: restarted.note_loss(1))]
    for now[0], step in sorted(times, key=lambda one: one[0]):
        step()
    restored = emitted.call_args
    assert restored.args == ("engine restored",)
    assert restored.kwargs["seconds"] == seconds
    assert restored.kwargs["detected"] == 160 - seconds
    assert restored.kwargs["process_seconds"] == 35
    now[0] = 200.0
    restarted.note_loss(1)
    assert records["outages/job/1"]["since"] == 200, "the next outage is another one"


def test_a_head_that_does_not_answer_does_not_end_a_run_that_only_measures_an_outage(
    records: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    emitted, slow = MagicMock(), MagicMock(side_effect=TimeoutError("the head is busy"))
    monkeypatch.setattr(events, "emit", emitted)
    restarted.begin("job", 1)
    monkeypatch.setattr(gcs_kv, "_warned", threading.Event())
    monkeypatch.setattr(ray_private, "incarnation", str)
    for name in ("put_record", "add_record", "list_records"):
        monkeypatch.setattr(gcs_kv, name, slow)
    caplog.clear()
    restarted.weights_received()
    restarted.note_loss(1)
    team = roster.Roster(["engine"])
    team.drop("engine", "it was lost")
    assert [given.args[0] for given in emitted.call_args_list[1:]] == ["engine restored", "engine lost"]
    assert sum("Ray's head did not" in record.getMessage() for record in caplog.records) == 1


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> dict[Any, str]:
    """The states of actors other than "ALIVE", by their handles' identity."""
    found: dict[Any, str] = {}
    monkeypatch.setattr(ray_private, "handle_state", lambda handle: found.get(id(handle), "ALIVE"))
    monkeypatch.setattr(roster, "_rosters", {})
    monkeypatch.setattr(recipes, "load", lambda _: None)
    monkeypatch.setattr(recipes, "lost_nodes", lambda _: [])
    monkeypatch.setattr(gcs_kv, "list_records", lambda *_: [])
    monkeypatch.setattr(actor_registry, "describe_callee", lambda _: "engine")
    noted: set[str] = set()

    def add_record(key: str, _: dict[str, Any]) -> bool:
        is_new = key not in noted
        noted.add(key)
        return is_new

    monkeypatch.setattr(ray_private, "incarnation", lambda handle: str(id(handle)))
    monkeypatch.setattr(gcs_kv, "add_record", add_record)
    monkeypatch.setattr(gcs_kv, "put_record", MagicMock())
    return found


def assigned(engines: list[Any], prompts: Sequence[str] = ("a",)) -> list[int]:
    parameters = SimpleNamespace(max_tokens=4)
    return request_balancer.assign_usable(engines, prompts, _tokens, parameters, 64, 1)


def test_prompts_go_to_engines_that_have_the_weights(
    states: dict[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(env_vars.REPEATABLE, raising=False)
    engines = [engine(unfinished_work=work) for work in (UnavailableError(), 7, None, 0)]
    states[id(engines[0])] = "RESTARTING"
    usable = [engines[1], engines[3]]
    assert set(assigned(engines, ["a", "b", "c"])) == {0, 1}
    assert engines == usable
    assert set(roster.of(engines).lost) == {0, 2}
    dead = [engine(unfinished_work=LostError("dead"))]
    with pytest.raises(LostError, match="dead"):
        assigned(dead)


def test_a_call_that_did_not_reach_a_living_engine_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", MagicMock())
    answers = iter([UnavailableError(), UnavailableError(), 0])
    engines = [SimpleNamespace(unfinished_work=SimpleNamespace(remote=lambda: Reference(next(answers))))]
    assert assigned(engines) == [0]
    assert len(engines) == 1


@pytest.mark.parametrize("restarts_allowed", [0, 1])
def test_an_engine_that_does_not_answer_in_time_is_restarted_if_it_may(
    ray: MagicMock, monkeypatch: pytest.MonkeyPatch, restarts_allowed: int
) -> None:
    """As when its process is stopped while it sleeps: Ray has it alive."""
    monkeypatch.setenv(env_vars.ENGINE_RESTARTS, str(restarts_allowed))
    monkeypatch.setattr(roster, "NOTICE_SECONDS", 0.0)
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "0.001")
    silent, other = engine(unfinished_work=TimeoutError()), engine(unfinished_work=0)
    engines = [silent, other]
    if restarts_allowed:
        assert assigned(engines) == [0]
        assert engines == [other]
        ray.kill.assert_called_once_with(silent, no_restart=False)
    else:
        with pytest.raises(SyncError, match="unfinished_work: no answer from engine"):
            assigned(engines)
        ray.kill.assert_not_called()


def test_without_an_engine_that_has_the_weights_the_trainer_sends_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    restarting = engine(unfinished_work=None, needs_weights=True)
    engines = [restarting]
    with pytest.raises(PeerError, match="the trainer cannot send them now"):
        assigned(engines)
    assert engines == []

    def send() -> None:
        roster.of(engines).put_back(0, engine(unfinished_work=0))

    restarts.use_to_send_weights(send)
    assert assigned(engines) == [0]


def test_engines_that_sleep_are_wholly_awake_when_they_generate_after_a_recovery(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recipes, "load", lambda _: {"sleeps": True, "name": None})
    work: list[Any] = [None]
    tags: list[Any] = []

    def wake_up(**given: Any) -> Reference:
        tags.append(given.get("tags"))
        return Reference(None)

    restarted_engine = SimpleNamespace(
        needs_weights=remote(True),
        unfinished_work=SimpleNamespace(remote=lambda: Reference(work[0])),
        wake_up=SimpleNamespace(remote=wake_up),
    )
    engines: list[Any] = [restarted_engine]

    def send() -> None:  # as upstream's, after which the memory of the cache is not mapped
        roster.of(engines).put_back(0, restarted_engine)
        restarted_engine.wake_up.remote(tags=["weights"])
        work[0] = 0

    restarts.use_to_send_weights(send)
    assert assigned(engines) == [0]
    assert tags == [["weights"], None]


def test_an_engine_to_which_another_process_sent_the_weights_is_used_again() -> None:
    engines = [engine(unfinished_work=0), engine(unfinished_work=0, needs_weights=False)]
    team = roster.of(engines)
    team.drop(engines[1], "it was lost")
    assert len(engines) == 1
    assert set(assigned(engines, ["a", "b"])) == {0, 1}
    assert not team.lost


@pytest.mark.parametrize("moved", [True, False])
def test_the_generator_finds_an_engine_that_the_trainer_has_moved(
    ray: MagicMock, states: dict[Any, str], monkeypatch: pytest.MonkeyPatch, moved: bool
) -> None:
    """Two processes, as in asynchronous training: the trainer has ended the former actor."""
    monkeypatch.setenv(env_vars.ENGINE_RESTARTS, "1")
    record: dict[str, Any] = {"name": None}
    monkeypatch.setattr(recipes, "load", lambda _: record)
    dead = engine(unfinished_work=0, generate_responses=LostError("dead"))
    ray.get_actor.return_value = engine(unfinished_work=0, needs_weights=False, generate_responses=["a"])
    engines: list[Any] = [dead]
    assert assigned(engines) == [0]
    reference = requested(engines, "a")
    dead.unfinished_work = remote(LostError("dead"))
    states[id(dead)] = "DEAD"
    if moved:
        record["name"] = "replacement"
        assert prompt_requests.answers_of(reference) == ["a"]
        assert engines == [ray.get_actor.return_value]
    else:
        with pytest.raises(LostError, match="dead"):
            prompt_requests.answers_of(reference)


def test_a_loss_is_one_event_of_all_processes_and_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    emitted = MagicMock()
    monkeypatch.setattr(events, "emit", emitted)
    incarnation = ["actor/1"]
    monkeypatch.setattr(ray_private, "incarnation", lambda _: incarnation[0])
    handle = engine()
    trainer, generator = (roster.Roster([handle]) for _ in range(2))
    trainer.drop(handle, "it was restarted")
    trainer.put_back(0, handle)
    trainer.drop(handle, "the sync after its restart has failed")
    generator.drop(handle, "it was restarted")
    emitted.assert_called_once_with("engine lost", engine=0, reason="it was restarted")
    trainer.put_back(0, handle)
    emitted.reset_mock()
    incarnation[0] = "actor/2"
    trainer.drop(handle, "it was restarted again")
    emitted.assert_called_once()


# As Ray raises what an actor has raised.
NeedsWeightsOfRay = type("RayTaskError(NeedsWeightsError)", (restarted.NeedsWeightsError,), {})


@pytest.mark.parametrize(
    ("error", "other"),
    [
        (UnavailableError, UnavailableError),
        (NeedsWeightsOfRay, UnavailableError),
        (UnavailableError, NeedsWeightsOfRay),
        (LostAnswerError, UnavailableError),
        (UnavailableError, LostAnswerError),
        (UnrecoverableError, LostAnswerError),
    ],
)
def test_only_unanswered_prompts_of_a_lost_engine_move(
    states: dict[Any, str], monkeypatch: pytest.MonkeyPatch, error: type[Exception], other: type[Exception]
) -> None:
    moved = MagicMock()
    monkeypatch.setattr(events, "emit", moved)
    lost = {"a": ["answered"], "b": other("b"), "c": error("c")}
    engines = [
        SimpleNamespace(
            unfinished_work=remote(UnavailableError()),
            generate_responses=SimpleNamespace(remote=lambda prompt, **_: Reference(lost[prompt])),
        ),
        SimpleNamespace(
            unfinished_work=remote(0),
            generate_responses=SimpleNamespace(remote=lambda prompt, **_: Reference([f"again {prompt}"])),
        ),
    ]
    states[id(engines[0])] = "RESTARTING"
    references = [requested(engines, prompt) for prompt in lost]
    answers = [prompt_requests.answers_of(reference) for reference in reversed(references)]
    assert answers == [["again c"], ["again b"], ["answered"]]
    moved.assert_any_call("prompts moved", engine=0, prompts=2)


@pytest.mark.parametrize(
    "error", [OwnerDiedError, type("RayTaskError(ObjectLostError)", (LostAnswerError,), {})]
)
def test_no_other_error_of_an_answer_is_a_lost_node(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Not a dead owner, nor an object that the engine's own code has lost."""
    answers: dict[str, Any] = {"a": error("a"), "b": UnavailableError("b")}
    engines = [
        SimpleNamespace(
            unfinished_work=remote(0),
            generate_responses=SimpleNamespace(remote=lambda prompt, **_: Reference(answers[prompt])),
        )
    ]
    first, second = (requested(engines, prompt) for prompt in answers)
    answers |= {"a": ["again"], "b": ["again"]}
    assert prompt_requests.answers_of(second) == ["again"]
    with pytest.raises(error):
        prompt_requests.answers_of(first)


def test_a_run_without_restarts_does_not_query_its_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.ENGINE_RESTARTS, "0")
    restarts.wait_for_restarts([object()], object())  # an object has no `needs_weights`


@pytest.mark.parametrize(
    ("state", "ready", "gone", "replaced", "expected"),
    [
        ("ALIVE", True, [], False, None),
        ("RESTARTING", True, ["10.0.0.2"], True, None),
        ("RESTARTING", True, [], False, (StartError, r"engines \[0\] are not up after 0.001 s")),
        ("ALIVE", UnavailableError(), [], False, (StartError, r"engines \[0\] are not up after 0.001 s")),
        ("DEAD", LostError("dead"), [], False, (LostError, "dead")),
    ],
    ids=["up", "elsewhere", "restarting", "unreachable", "dead"],
)
def test_the_wait_for_a_restart_is_bounded(
    states: dict[Any, str],
    records: dict[str, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    ready: Any,
    gone: list[str],
    replaced: bool,
    expected: tuple[type[Exception], str] | None,
) -> None:
    monkeypatch.setenv(env_vars.ENGINE_TIMEOUT, "0.001")
    monkeypatch.setattr(recipes, "lost_nodes", lambda _: gone)
    new = SimpleNamespace(__ray_ready__=remote(True))
    monkeypatch.setattr(recipes, "replace", lambda *_: new if replaced else None)
    lost = SimpleNamespace(__ray_ready__=remote(ready))
    states[id(lost)] = state
    engines: list[Any] = [lost]
    team = roster.of(engines)
    team.drop(lost, "it was lost")
    if expected is None:
        assert restarts._bring_back(team, 0) is (new if replaced else lost)
    else:
        with pytest.raises(expected[0], match=expected[1]):
            restarts._bring_back(team, 0)


def test_an_engine_that_is_lost_while_it_is_put_to_sleep_is_permitted_to_start_again(
    states: dict[Any, str], records: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray repeats the call on the restarted engine, which waits for the permit."""
    monkeypatch.setenv(env_vars.ENGINE_RESTARTS, "2")
    monkeypatch.setattr(recipes, "load", lambda _: {"sleeps": True, "name": None})
    lost = SimpleNamespace(__ray_ready__=remote(True))
    restarted.begin("job", 0)
    calls: list[Any] = []

    def sleep() -> Reference:
        calls.append(None)
        if len(calls) == 1:
            states[id(lost)] = "RESTARTING"
            restarted.begin("job", 0)
            return Reference(TimeoutError())
        return Reference(None)

    def wait(_: float) -> None:
        if records.get("permits/job/0") == {"engine": 0, "restarts": 2}:
            states[id(lost)] = "ALIVE"

    lost.sleep = SimpleNamespace(remote=sleep)
    monkeypatch.setattr(time, "sleep", wait)
    team = roster.of([lost])
    team.drop(lost, "it was lost")
    assert restarts._bring_back(team, 0) is lost
    assert len(calls) == 2


def test_a_restarted_engine_that_is_lost_again_is_not_awaited_by_the_generator(
    states: dict[Any, str],
) -> None:
    lost = SimpleNamespace()

    def needs_weights() -> Reference:
        states[id(lost)] = "RESTARTING"
        return Reference(TimeoutError())

    lost.needs_weights = SimpleNamespace(remote=needs_weights)
    engines = [lost, engine(unfinished_work=0)]
    roster.of(engines).drop(lost, "it was lost")
    assert assigned(engines) == [0]
    assert set(roster.of(engines).lost) == {0}


@pytest.mark.parametrize("room", [True, False], ids=["elsewhere", "too few are left"])
def test_an_engine_whose_node_is_lost_while_it_starts_is_replaced(
    records: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    monkeypatch.setenv(env_vars.MIN_ENGINES, "2")
    monkeypatch.setattr(recipes, "lost_nodes", lambda index: ["10.0.0.2"] if index == 1 else [])
    replace = MagicMock(return_value="new" if room else None)
    monkeypatch.setattr(recipes, "replace", replace)
    engines = ["up", "lost"]
    if room:
        assert restarts._start_again(engines, [0, 1], {}, set()) == {1: "new"}
        replace.assert_called_once_with(1, "lost", wait=False)
        assert not any(key.startswith("deferred-group") for key in records), "rank 0 waits for it"
    else:
        reason = (
            "engine 1 cannot be restarted: its node 10.0.0.2 is gone, .*; 1 engines are left, and .* is 2"
        )
        with pytest.raises(PeerError, match=reason):
            restarts._start_again(engines, [0, 1], {}, set())


@pytest.mark.parametrize("room", ["elsewhere", "on a new node", ""])
def test_rank_0_does_not_wait_for_an_engine_whose_node_is_lost_after_its_start(
    ray: MagicMock, records: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, room: str
) -> None:
    """Nor as long as the process that creates the engines waits for a place."""
    monkeypatch.setenv(env_vars.ENGINE_RESTARTS, "1")
    monkeypatch.setenv(env_vars.AUTOSCALE, "1")
    monkeypatch.setattr(
        gcs_kv, "list_records", lambda key, *_: [records[one] for one in records if one == key]
    )
    lost, left, new = (engine(__ray_ready__=True, needs_weights=False) for _ in range(3))
    created = [lost, left]
    monkeypatch.setattr(
        recipes, "lost_nodes", lambda index: ["10.0.0.2"] if index == 0 and created[0] is lost else []
    )
    tried: list[tuple[bool, bool]] = []

    def replace(*_: Any, wait: bool = True) -> Any:
        tried.append((wait, roster.is_group_deferred()))
        return new if room == "elsewhere" or (room and wait) else None

    def wait(references: list[Any], timeout: float | None, **_: Any) -> tuple[list[Any], list[Any]]:
        assert timeout is not None, "the trainer may wait for the engine"
        ready = [one for one in references if one is not trainer or roster.is_group_deferred()][:1]
        return ready, [one for one in references if one not in ready]

    trainer = Reference(None)
    ray.wait.side_effect = wait
    monkeypatch.setattr(recipes, "replace", replace)
    restarts.wait_for_start(created, [trainer])
    assert created == [new if room else lost, left]
    assert tried == [(False, False), *([] if room == "elsewhere" else [(True, True)])]
    assert roster.Roster(created).grouped == []


def test_a_location_is_not_awaited_from_an_engine_that_is_lost_while_it_is_asked(
    states: dict[Any, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray repeats the call until the engine has started again."""
    monkeypatch.setenv(env_vars.ENGINE_RESTARTS, "1")
    monkeypatch.setenv(env_vars.EVENTS, str(tmp_path))

    def where() -> Reference:
        states[id(lost)] = "RESTARTING"
        return Reference(TimeoutError())

    lost = SimpleNamespace(where=SimpleNamespace(remote=where))
    restarts.record_models_ready([lost, engine(where=[{"rank": 0, "node_id": "a"}])])
    assert [event["engine"] for event in events.read(tmp_path) if event["event"] == "engine"] == [1]


def test_a_run_begins_without_an_engine_that_has_no_place_and_which_comes_back_before_a_sync(
    ray: MagicMock,
    states: dict[Any, str],
    records: dict[str, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three processes: the one that creates the engines, rank 0, and the trainer."""
    monkeypatch.setenv(env_vars.ENGINE_RESTARTS, "1")
    monkeypatch.setattr(recipes, "lost_nodes", lambda index: ["10.0.0.2"] if index == 0 else [])
    place: list[Any] = [None]
    monkeypatch.setattr(recipes, "replace", lambda *_, **__: place[0])
    monkeypatch.setattr(restarts, "wait_for_sync", MagicMock())
    ray.wait.side_effect = lambda references, **_: (
        [one for one in references if not isinstance(one.result, TimeoutError)][:1],
        [one for one in references if isinstance(one.result, TimeoutError)],
    )
    lost = engine(__ray_ready__=TimeoutError(), unfinished_work=UnavailableError(), where=TimeoutError())
    left = engine(
        __ray_ready__=True, needs_weights=False, unfinished_work=0, leave_weight_group=None, where=[]
    )
    states[id(lost)] = "RESTARTING"

    created = [lost, left]
    restarts.wait_for_start(created)
    assert created == [lost, left], "an engine's position is its index"
    restarts.record_models_ready(created)

    form = MagicMock(__name__="form")
    restarts.forms_weight_group(form)(rank_0([lost, left]), "gloo")
    form.assert_not_called()

    engines, group = [lost, left], MagicMock()
    restarts.wait_for_restarts(engines, group)
    assert engines == [left]
    group.async_run_method.assert_called_once_with("form_weight_group", {1: left})

    place[0] = new = engine(__ray_ready__=True, leave_weight_group=None)
    restarts.wait_for_restarts(engines, group)
    assert engines == [new, left]
    group.async_run_method.assert_called_with("form_weight_group", {0: new, 1: left})


def test_rank_0_does_not_wait_for_ever_for_an_engine(ray: MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.ENGINE_RESTARTS, "1")
    monkeypatch.setenv(env_vars.ENGINE_TIMEOUT, "0.001")
    ray.wait.side_effect = lambda references, **_: ([], references)
    form = MagicMock(__name__="form")
    trainer = SimpleNamespace(vllm_engines=[engine(__ray_ready__=None)])
    with pytest.raises(StartError, match=r"engines \[0\] are not up after 0.001 s"):
        restarts.forms_weight_group(form)(trainer, "gloo")


@pytest.mark.parametrize("when", ["before", "in the formation"])
def test_a_group_of_rays_collectives_cannot_be_formed_later(
    states: dict[Any, str], records: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setenv(env_vars.ENGINE_RESTARTS, "1")
    lost = engine(__ray_ready__=True, needs_weights=TimeoutError())

    def form(*_: Any) -> None:
        assert when == "in the formation"
        states[id(lost)] = "RESTARTING"
        raise PeerError("engine 0 is dead")

    if when == "before":
        states[id(lost)] = "RESTARTING"
    with pytest.raises(PeerError, match=r"--vllm.sync_with_ray cannot leave out an engine"):
        restarts.forms_weight_group(form)(rank_0([lost], by_ray=True), "nccl")


def test_no_first_group_is_formed_with_an_engine_that_was_lost_after_its_start(
    states: dict[Any, str], records: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 would wait for its restart, which the process that creates the engines does not notice."""
    monkeypatch.setenv(env_vars.ENGINE_RESTARTS, "1")
    lost = engine(__ray_ready__=True)
    states[id(lost)] = "RESTARTING"
    form = MagicMock(__name__="form")
    restarts.forms_weight_group(form)(rank_0([lost]), "gloo")
    form.assert_not_called()
    assert roster.Roster([lost]).grouped == []


def test_the_time_starts_again_with_a_restart_at_the_start_until_all_restarts_are_used(
    records: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env_vars.ENGINE_RESTARTS, "1")
    seen: dict[int, int] = {}
    for index in range(restarts.TOTAL):
        restarted.begin("job", index)
        assert restarts._start_again("abcd", [0, 1, 2, 3], seen, set()) == {index: "abcd"[index]}
        assert restarts._start_again("abcd", [0, 1, 2, 3], seen, set()) == {}
    restarted.begin("job", 3)
    with pytest.raises(PeerError, match="restarted 4 times, and 3 are allowed for all together"):
        restarts._start_again("abcd", [3], seen, set())


def test_each_restart_of_an_engine_that_is_awaited_has_the_whole_time(
    states: dict[Any, str], records: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env_vars.ENGINE_TIMEOUT, "10")
    monkeypatch.setenv(env_vars.ENGINE_RESTARTS, "3")
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    lost = SimpleNamespace(__ray_ready__=remote(True))
    states[id(lost)] = "RESTARTING"

    def wait(_: float) -> None:
        now[0] += 1
        if now[0] in (9, 18, 27):  # the third one begins after a pause of 10 s
            records["restarts/job/0"] = {"engine": 0, "restarts": now[0] // 9}
        if now[0] == 45:
            states[id(lost)] = "ALIVE"

    monkeypatch.setattr(time, "sleep", wait)
    team = roster.of([lost])
    team.drop(lost, "it was lost")
    assert restarts._bring_back(team, 0) is lost
    records["restarts/job/1"] = {"engine": 1, "restarts": 7}
    with pytest.raises(PeerError, match="restarted 10 times, and 9 are allowed"):
        restarts._bring_back(team, 0)


@pytest.mark.parametrize("replaced", [True, False])
def test_the_trainer_uses_the_engine_that_replaced_one_which_had_not_started(
    ray: MagicMock, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    monkeypatch.setenv(env_vars.ENGINE_RESTARTS, "1")
    records: list[dict[str, Any]] = [{"name": None}]
    new, lost = engine(__ray_ready__=True), engine(__ray_ready__=LostError("dead"))
    ray.get_actor.return_value = new

    def wait(engines: list[Any]) -> None:
        if engines == [lost]:
            records[0] = {"name": "replacement" if replaced else None}
            raise PeerError("engine 0 is dead")

    monkeypatch.setattr(recipes, "load", lambda _: records[0])
    monkeypatch.setattr(restarts, "wait_for_engine_start", wait)
    trainer = SimpleNamespace(vllm_engines=[lost])
    form = MagicMock(__name__="form")
    if replaced:
        restarts.forms_weight_group(form)(trainer, "gloo")
        form.assert_called_once_with(trainer, "gloo")
        assert trainer.vllm_engines == [new]
        engines: list[Any] = [lost]
        assert roster.of(engines).handles == {0: new}
        assert engines == [new]
    else:
        with pytest.raises(PeerError, match="engine 0 is dead"):
            restarts.forms_weight_group(form)(trainer, "gloo")


def test_a_run_goes_on_without_an_engine_that_has_no_place(
    states: dict[Any, str], records: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env_vars.ENGINE_RESTARTS, "1")
    monkeypatch.setattr(recipes, "lost_nodes", lambda _: ["10.0.0.2"])
    monkeypatch.setattr(recipes, "replace", lambda *_: None)
    monkeypatch.setattr(restarts, "_check_total", lambda: None)
    wait = MagicMock()
    monkeypatch.setattr(restarts, "wait_for_sync", wait)
    lost = engine(unfinished_work=UnavailableError())
    left = engine(unfinished_work=0, leave_weight_group=None)
    states[id(lost)] = "RESTARTING"
    engines, group = [lost, left], MagicMock()
    restarts.wait_for_restarts(engines, group)
    assert engines == [left]
    group.async_run_method.assert_called_once_with("form_weight_group", {1: left})
    restarts.wait_for_restarts(engines, group)
    assert wait.call_count == 1, "the group has no other members than before"


def test_a_recovery_is_measured_without_an_engine_that_an_earlier_one_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_metrics, "publish", MagicMock())
    emitted = MagicMock()
    monkeypatch.setattr(events, "emit", emitted)
    monkeypatch.setattr(restarts, "_form_group", lambda *_: True)
    engines = [engine(number=number) for number in range(3)]
    team = roster.of(engines)
    for index, seconds in ((0, 400), (1, 40)):
        team.drop(team.handles[index], "it was lost")
        team.lost[index] -= seconds
    team.grouped = [team.handles[1], team.handles[2]]
    monkeypatch.setattr(restarts, "_bring_back", lambda _, index: team.handles[1] if index else None)
    restarts._recover(team, None, is_group_broken=True)
    recovered = emitted.call_args.kwargs
    assert (recovered["lost"], recovered["back"]) == ([0, 1], [1])
    assert 40 <= time.time() - recovered["detected"] < 400


@pytest.mark.parametrize("is_back", [True, False])
def test_engines_are_counted_after_all_lost_ones_that_can_are_back(
    monkeypatch: pytest.MonkeyPatch, is_back: bool
) -> None:
    monkeypatch.setattr(run_metrics, "publish", MagicMock())
    emitted = MagicMock()
    monkeypatch.setattr(events, "emit", emitted)
    monkeypatch.setattr(recipes, "lost_nodes", lambda index: [f"10.0.0.{index}"])
    monkeypatch.setattr(restarts, "_form_group", lambda *_: True)
    engines = [engine(), engine()]
    team = roster.of(engines)
    for lost in list(engines):
        team.drop(lost, "it was lost")
    team.lost[1] -= 40
    back = {0: None, 1: team.handles[1] if is_back else None}
    monkeypatch.setattr(restarts, "_bring_back", lambda _, index: back[index])
    if is_back:
        restarts._recover(team, None, is_group_broken=True)
        assert engines == [back[1]]
        recovered = emitted.call_args
        assert (recovered.args, recovered.kwargs["back"]) == (("recovered",), [1])
        assert recovered.kwargs["seconds"] < 40 <= time.time() - recovered.kwargs["detected"]
    else:
        reason = "engine 0 cannot be restarted: its node 10.0.0.0 is gone, .*; 0 engines are left"
        with pytest.raises(PeerError, match=reason):
            restarts._recover(team, None, is_group_broken=True)


@pytest.mark.parametrize(
    ("restarts_allowed", "failures", "lost", "syncs"),
    [(1, 1, False, 2), (1, 2, False, None), (1, 3, True, 4), (0, 1, True, None)],
    ids=["a passing cause", "a lasting cause", "an engine is lost each time", "no restarts"],
)
def test_a_failed_sync_is_repeated(
    monkeypatch: pytest.MonkeyPatch, restarts_allowed: int, failures: int, lost: bool, syncs: int | None
) -> None:
    monkeypatch.setenv(env_vars.ENGINE_RESTARTS, str(restarts_allowed))
    outcomes = iter([SyncError("rank 2 does not answer")] * failures + [None])

    def wait(*_: Any) -> None:
        if outcome := next(outcomes):
            raise outcome

    monkeypatch.setattr(restarts, "wait_for_sync", wait)
    monkeypatch.setattr(restarts, "_drop_lost", lambda *_: [0] if lost else [])
    monkeypatch.setattr(restarts, "_restarts", dict)
    monkeypatch.setattr(restarts, "_recover", MagicMock())
    logs: dict[str, float] = {}
    monkeypatch.setattr("rlhf_stack.telemetry.events.log_with_step", logs.update)
    engines, group = [engine(weights_received=(3, 2)), engine(weights_received=(3, 5))], MagicMock()
    if syncs is None:
        with pytest.raises(SyncError, match="rank 2 does not answer"):
            restarts.sync_weights(engines, group, sleeps=False)
    else:
        restarts.sync_weights(engines, group, sleeps=False)
        assert group.async_run_method.call_count == syncs
    assert logs == ({} if syncs is None else {"weights/version": 3, "weights/mixed_answers": 7})


class Engine:
    """An engine of a `FakeRun`, which is lost while it answers a call ``lost_in``, or in the trainer's."""

    def __init__(self, lost_in: str = "") -> None:
        self.number, self.has_weights, self.left = 0, True, False
        self.lost_in = lost_in

    def __getattr__(self, name: str) -> SimpleNamespace:
        answers = {
            "unfinished_work": lambda: 0 if self.has_weights else None,
            "leave_weight_group": self._leave,
        }
        method = SimpleNamespace(remote=lambda *_, **__: Reference(self._answer(name, answers.get(name))))
        method.options = lambda **_: method
        return method

    def lose(self) -> None:
        """Let Ray restart it."""
        self.lost_in = ""
        self.number, self.has_weights, self.left = self.number + 1, False, True

    def _answer(self, name: str, action: Callable[[], Any] | None) -> Any:
        if self.lost_in == name:
            self.lose()
            return UnavailableError(name)
        return action() if action else (1, 0)

    def _leave(self) -> None:
        self.left = True


class FakeRun:
    """A run whose engines are lost as they say, and whose syncs fail as long as an engine lacks its group."""

    def __init__(self, engines: Sequence[Engine], failures: int = 0) -> None:
        self.engines, self.failures, self.calls = engines, failures, list[str]()

    def async_run_method(self, name: str, *arguments: Any) -> list[Reference]:
        self.calls.append(name)
        return [Reference(name)]

    def wait(self, references: Sequence[Reference], engines: Sequence[Engine]) -> None:
        (name,) = [reference.result for reference in references]
        if any(not engine.left for engine in engines) and name == "form_weight_group":
            raise SyncError("an engine reports its error of the former group")
        for one in engines:
            if one.lost_in == name:
                one.lose()
                raise PeerError("the second engine is dead")
        if name == "form_weight_group":
            for one in engines:
                one.left = False
        elif self.failures:
            self.failures -= 1
            raise SyncError("a link is cut")
        else:
            for one in engines:
                one.has_weights = True


@pytest.fixture
def recovering(
    ray: MagicMock,
    states: dict[Any, str],
    records: dict[str, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[FakeRun], None]:
    """Sync the weights of a run, of which an engine may be lost at any time."""
    monkeypatch.setenv(env_vars.ENGINE_RESTARTS, "1")
    monkeypatch.setattr("rlhf_stack.telemetry.events.log_with_step", MagicMock())

    def sync(run: FakeRun) -> None:
        monkeypatch.setattr(restarts, "_restarts", lambda: {i: e.number for i, e in enumerate(run.engines)})
        monkeypatch.setattr(restarts, "wait_for_sync", run.wait)
        restarts.sync_weights(list(run.engines), run, sleeps=False)

    return sync


SYNC, FORM = "broadcast_to_vllm", "form_weight_group"


@pytest.mark.parametrize(
    ("second", "calls"),
    [
        ("", [SYNC, FORM, SYNC]),
        (FORM, [SYNC, FORM, FORM, SYNC]),
        ("leave_weight_group", [SYNC, FORM, SYNC]),
    ],
)
def test_a_second_engine_that_is_lost_during_the_recovery_is_recovered_too(
    recovering: Callable[[FakeRun], None], second: str, calls: list[str]
) -> None:
    run = FakeRun([Engine(SYNC), Engine(second), Engine()])
    recovering(run)
    assert run.calls == calls
    assert all(one.has_weights for one in run.engines)


@pytest.mark.parametrize("is_lost", [True, False])
def test_an_engine_that_is_lost_in_the_first_formation_is_in_the_group_of_the_first_sync(
    recovering: Callable[[FakeRun], None], monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """The process that creates the engines has waited for its restart before the first step."""
    run = FakeRun([Engine(), Engine("needs_weights" if is_lost else ""), Engine()])
    form = MagicMock(__name__="form", side_effect=PeerError("engine 1 is dead"))
    monkeypatch.setattr(restarts, "_restarts", lambda: {i: e.number for i, e in enumerate(run.engines)})
    monkeypatch.setattr(restarts, "wait_for_engine_start", MagicMock())
    trainer = rank_0(run.engines)
    if not is_lost:
        with pytest.raises(PeerError, match="engine 1 is dead"):
            restarts.forms_weight_group(form)(trainer, "gloo")
        return
    restarts.forms_weight_group(form)(trainer, "gloo")
    for one in run.engines:
        one.has_weights = True
    recovering(run)
    assert run.calls == [FORM, SYNC]


def test_the_cause_of_a_failed_sync_that_lasts_ends_the_run_after_a_restart_too(
    recovering: Callable[[FakeRun], None],
) -> None:
    """The engine that was restarted lacks the weights after each failed sync, but is not lost each time."""
    run = FakeRun([Engine(SYNC), Engine()], failures=9)
    with pytest.raises(SyncError, match="a link is cut"):
        recovering(run)
    assert run.calls == [SYNC, FORM, SYNC]


@pytest.mark.parametrize("here", [True, False])
def test_the_list_that_other_processes_get_has_every_engine(
    states: dict[Any, str], monkeypatch: pytest.MonkeyPatch, here: bool
) -> None:
    """As when an engine is lost while it is put to sleep for the first time."""
    monkeypatch.setenv(env_vars.ENGINE_RESTARTS, "1")
    monkeypatch.setattr(recipes, "created_here", lambda: here)
    wait = MagicMock()
    monkeypatch.setattr(restarts, "wait_for_start", wait)
    lost, other = engine(sleep=TimeoutError()), engine(sleep=None)
    states[id(lost)] = "RESTARTING"
    engines = [lost, other]
    references = [one.sleep.remote() for one in engines]
    assert restarts.engine_results(engines, references, "sleep", (), {}) == [None]
    assert engines == ([lost, other] if here else [other])
    assert wait.called == here


def test_a_call_to_an_engine_that_was_replaced_before_goes_to_the_new_one(
    states: dict[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first use of a list in a process, such as that of the trainer in asynchronous training."""
    monkeypatch.setenv(env_vars.ENGINE_RESTARTS, "1")
    monkeypatch.setattr(roster, "is_group_deferred", lambda: False)
    former, other, new = engine(pause=LostError("dead")), engine(pause="other"), engine(pause="new")
    monkeypatch.setattr(recipes, "current", lambda index, handle: new if index == 0 else handle)
    states[id(former)] = "DEAD"
    engines = [former, other]
    references = [one.pause.remote() for one in engines]
    assert roster.engine_results(engines, references, "pause", (), {}) == ["new", "other"]
    assert engines == [new, other]


def test_no_sync_begins_with_a_group_of_which_an_engine_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when an engine is lost while upstream wakes it up before the sync."""
    monkeypatch.setenv(env_vars.ENGINE_RESTARTS, "1")
    monkeypatch.setattr(restarts, "_restarts", dict)
    monkeypatch.setattr(events, "log_with_step", MagicMock())
    woken: list[Any] = []

    def wake_up(tags: list[str]) -> Reference:
        woken.append(tags)
        return Reference(None)

    one = SimpleNamespace(weights_received=remote((1, 0)), wake_up=SimpleNamespace(remote=wake_up))
    engines = [one, engine()]
    team = roster.of(engines)
    team.drop(engines[1], "wake_up: its process or node was lost")
    done: list[str] = []

    def recover(*_: Any) -> None:
        done.append("recovered")
        team.grouped = list(team.engines)

    def run(method: str) -> list[Any]:
        done.append(method)
        return []

    monkeypatch.setattr(restarts, "_recover", recover)
    monkeypatch.setattr(restarts, "wait_for_sync", MagicMock())
    restarts.sync_weights(engines, SimpleNamespace(async_run_method=run), sleeps=True)
    assert (done, woken) == (["recovered", "broadcast_to_vllm"], [["weights"]])


def test_a_restarted_engine_that_sleeps_starts_when_the_trainer_permits(
    records: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = MagicMock()
    waited.side_effect = lambda _: restarted.permit(1) if waited.call_count == 3 else None
    monkeypatch.setattr(time, "sleep", waited)
    restarted.begin("job", 1, sleeps=True)
    assert waited.call_count == 3
    assert records["permits/job/1"] == {"engine": 1, "restarts": 1}


def _tokens(texts: list[str], **_: Any) -> dict[str, Any]:
    return {"input_ids": [[1] * 10 for _ in texts]}


def test_only_orphans_of_the_lost_engine_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def process(pid: int, parent: int, engine: str) -> Process:
        variables = {stale_resources.WORKER_MARK: "5", "RLHF_STACK_ENGINE": engine}
        return Process(pid, parent, os.getuid(), "S", 0, ("VLLM::Worker",), variables)

    raylet = Process(5, 1, os.getuid(), "S", 0, ("/opt/ray/raylet",))
    worker = Process(6, 5, os.getuid(), "S", 0, ("ray::Engine",), {stale_resources.WORKER_MARK: "5"})
    table = [raylet, worker, process(7, 6, "job/1"), process(8, 1, "job/1"), process(9, 1, "job/0")]
    monkeypatch.setattr(process_table, "snapshot", lambda: table)
    end = MagicMock()
    monkeypatch.setattr(terminate, "terminate_processes", end)
    restarted.end_former_processes({"RLHF_STACK_ENGINE": "job/1"})
    end.assert_called_once_with([table[3]])


def test_the_first_call_to_started_engines_is_repeated_if_its_connection_breaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(env_vars.ENGINE_RESTARTS, "1")
    monkeypatch.setattr(startup, "wait_for_engine_startup", MagicMock())
    monkeypatch.setattr(time, "sleep", MagicMock())
    answers = iter([UnavailableError(), False])
    started = SimpleNamespace(needs_weights=SimpleNamespace(remote=lambda: Reference(next(answers))))
    restarts.wait_for_start([started])
    assert not list(answers)


def test_an_engine_that_was_restarted_at_the_start_sleeps_as_the_others(
    states: dict[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env_vars.ENGINE_RESTARTS, "1")
    wait = MagicMock()
    monkeypatch.setattr(startup, "wait_for_engine_startup", wait)
    monkeypatch.setattr(recipes, "load", lambda _: {"sleeps": True})
    lost = SimpleNamespace(needs_weights=remote(True))
    calls: list[Any] = []

    def sleep() -> Reference:
        calls.append("sleep")
        states[id(lost)] = "RESTARTING" if len(calls) == 1 else "ALIVE"
        return Reference(TimeoutError() if len(calls) == 1 else None)

    def received(*, at_start: bool) -> Reference:
        calls.append(f"received {at_start}")
        return Reference((0, 0))

    lost.sleep = SimpleNamespace(remote=sleep)
    lost.weights_received = SimpleNamespace(remote=received)
    other = engine(needs_weights=False)
    restarts.wait_for_start([lost, other], ["the trainer"])
    assert calls == ["sleep", "sleep", "received True"], "it was lost again while it was put to sleep"
    assert [given.args[:2] for given in wait.call_args_list] == [
        ([lost, other], ["the trainer"]),
        ([lost, other], ()),
    ]
