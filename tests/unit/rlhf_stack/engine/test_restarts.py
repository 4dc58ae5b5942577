"""Restarts of lost engines and moves of their prompts; real engines are in tests/cluster."""

import os
import sys
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from rlhf_stack.cleanup import process_table, stale_resources, terminate
from rlhf_stack.cleanup.process_table import Process
from rlhf_stack.cluster import actor_registry, gcs_kv
from rlhf_stack.cluster.actor_registry import PeerError
from rlhf_stack.config import env_vars
from rlhf_stack.engine import prompt_requests, request_balancer, restarted, restarts, startup
from rlhf_stack.engine.startup import StartError
from rlhf_stack.sync import report
from rlhf_stack.telemetry import events


class LostError(Exception):
    """Ray's error for an actor that is dead."""


class RestartingError(LostError):
    """Ray's error for an actor that is restarted."""


class Reference:
    """A reference to ``result``, which can be a key."""

    def __init__(self, result: Any) -> None:
        self.result = result


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    def get(reference: Any, timeout: float | None = None) -> Any:  # noqa: ARG001
        if isinstance(reference, list):
            return [get(one) for one in reference]
        if isinstance(reference.result, Exception):
            raise reference.result
        return reference.result

    fake = MagicMock()
    fake.get.side_effect = get
    fake.wait.side_effect = lambda references, **_: (references, [])
    fake.exceptions = SimpleNamespace(
        RayActorError=LostError, ActorUnavailableError=RestartingError, GetTimeoutError=TimeoutError
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    stored: dict[str, dict[str, Any]] = {}
    monkeypatch.setattr(gcs_kv, "put_record", stored.__setitem__)
    monkeypatch.setattr(
        gcs_kv, "list_records", lambda key: [stored[one] for one in stored if one.startswith(key)]
    )
    monkeypatch.setattr(report, "set_metric", MagicMock())
    monkeypatch.setattr(time, "sleep", MagicMock())
    monkeypatch.setattr(restarted, "_pending", [])
    return stored


def remote(result: Any) -> SimpleNamespace:
    return SimpleNamespace(remote=lambda *_, **__: Reference(result))


@pytest.mark.parametrize(("value", "expected"), [("", 0), ("0", 0), ("12", 12)])
def test_restarts_are_off_by_default(monkeypatch: pytest.MonkeyPatch, value: str, expected: int) -> None:
    monkeypatch.setenv(env_vars.ENGINE_RESTARTS, value)
    assert env_vars.engine_restarts() == expected


@pytest.mark.parametrize("value", ["-1", "1.5", "many", "٣", "1000"])
def test_invalid_restarts_are_an_error(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(env_vars.ENGINE_RESTARTS, value)
    with pytest.raises(ValueError, match="RLHF_STACK_ENGINE_RESTARTS"):
        env_vars.engine_restarts()


def test_engines_that_share_memory_with_the_trainer_are_not_restarted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(env_vars.ENGINE_RESTARTS, "2")
    found = [restarts.most_restarts(shares, sleeps) for shares in (False, True) for sleeps in (False, True)]
    assert found == [2, 0, 0, 0]


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
    assert restarted.total("job") == 3
    assert records["restarts/job/1"] == {"engine": 1, "restarts": 2}


def test_a_restart_sets_the_metrics_of_restarts(records: dict[str, dict[str, Any]]) -> None:
    restarted.begin("job", 1)
    restarted.weights_received()
    del records
    calls = [call.args for call in report.set_metric.call_args_list]  # type: ignore[attr-defined]
    assert {(name, tag) for name, _, tag in calls} == {(name, "1") for name in report.RESTART_METRICS}
    assert calls[0] == ("rlhf_stack_engine_restarts", 1, "1")


def test_prompts_go_to_engines_that_have_the_weights(ray: MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    del ray
    monkeypatch.delenv(env_vars.REPEATABLE, raising=False)
    engines = [SimpleNamespace(unfinished_work=remote(work)) for work in (RestartingError(), 7, None, 0)]
    found = request_balancer.assign_usable(
        engines, ["a", "b", "c"], _tokens, SimpleNamespace(max_tokens=4), 64, 1
    )
    assert set(found) == {1, 3}
    dead = [SimpleNamespace(unfinished_work=remote(LostError("dead")))]
    with pytest.raises(LostError, match="dead"):
        request_balancer.assign_usable(dead, ["a"], _tokens, SimpleNamespace(max_tokens=4), 64, 1)


def test_without_an_engine_that_has_the_weights_the_trainer_sends_them(
    ray: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    del ray
    answers = iter([None, 0])
    engines = [SimpleNamespace(unfinished_work=SimpleNamespace(remote=lambda: Reference(next(answers))))]
    send = MagicMock()
    monkeypatch.setattr(restarts, "_senders", [])
    arguments = (["a"], _tokens, SimpleNamespace(max_tokens=4), 64, 1)
    with pytest.raises(PeerError, match="the trainer cannot send them now"):
        request_balancer.assign_usable(engines, *arguments)
    restarts.use_to_send_weights(send)
    answers = iter([None, 0])
    assert request_balancer.assign_usable(engines, *arguments) == [0]
    send.assert_called_once_with()


def test_only_unanswered_prompts_of_a_lost_engine_move(
    ray: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    del ray
    monkeypatch.setattr(prompt_requests, "_requests", {})
    moved = MagicMock()
    monkeypatch.setattr(events, "emit", moved)
    monkeypatch.setattr(actor_registry, "describe_lost_actor", str)
    lost = {"a": ["answered"], "b": RestartingError("b"), "c": RestartingError("c")}
    engines = [
        SimpleNamespace(
            unfinished_work=remote(RestartingError()),
            generate_responses=SimpleNamespace(remote=lambda prompt, **_: Reference(lost[prompt])),
        ),
        SimpleNamespace(
            unfinished_work=remote(0),
            generate_responses=SimpleNamespace(remote=lambda prompt, **_: Reference([f"again {prompt}"])),
        ),
    ]
    references = [
        prompt_requests.request_answers(
            engines,
            0,
            prompt=prompt,
            hf_tokenizer=_tokens,
            sampling_params=SimpleNamespace(max_tokens=4),
            max_length=64,
            num_samples=1,
        )
        for prompt in lost
    ]
    answers = [prompt_requests.answers_of(reference) for reference in reversed(references)]
    assert answers == [["again c"], ["again b"], ["answered"]]
    moved.assert_called_once_with("prompts moved", engine=0, prompts=2)


def test_a_run_without_restarts_does_not_query_its_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.ENGINE_RESTARTS, "0")
    restarts.wait_for_restarts([object()], object())  # an object has no `needs_weights`


@pytest.mark.parametrize(
    ("ready", "gone", "expected"),
    [
        (TimeoutError(), "two (10.0.0.2)", (PeerError, r"its node two \(10.0.0.2\) is gone")),
        (RestartingError(), None, (StartError, r"engines \[1\] are not up after 0.001 s")),
    ],
)
def test_the_wait_for_a_restart_is_bounded(
    ray: MagicMock,
    monkeypatch: pytest.MonkeyPatch,
    ready: Exception,
    gone: str | None,
    expected: tuple[type[Exception], str],
) -> None:
    del ray
    monkeypatch.setenv(env_vars.ENGINE_TIMEOUT, "0.001")
    monkeypatch.setattr(restarts, "POLL_SECONDS", 0.002)
    monkeypatch.setattr(actor_registry, "lost_node", lambda _: gone)
    monkeypatch.setattr(startup, "_last_steps", lambda _: [])
    error, text = expected
    with pytest.raises(error, match=text):
        restarts._wait_until_up(1, SimpleNamespace(__ray_ready__=remote(ready)))


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
