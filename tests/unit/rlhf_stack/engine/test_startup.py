"""Reports of an engine's startup; real engines are in tests/cluster and tests/patches."""

import asyncio
import sys
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from rlhf_stack.cluster import actor_registry, gcs_kv
from rlhf_stack.compat import resource_tracker
from rlhf_stack.config import env_vars
from rlhf_stack.engine import recipes, restarted, startup


def record(engine: int, who: str, step: str, ago: float) -> dict[str, object]:
    return {"engine": engine, "who": who, "step": step, "host": "node-2", "time": 1000.0 - ago}


def test_last_step_of_each_rank_of_a_late_engine_is_described() -> None:
    steps = [
        record(1, "engine 1", "actor started", 130),
        record(1, "engine 1 rank 3", "device and rendezvous ...", 120),
        record(10, "engine 10", "engine up", 1),
    ]
    assert startup.describe_steps(steps, [1, 2], 1000.0) == [
        "engine 1 on node-2: actor started, 130 s ago",
        "engine 1 rank 3 on node-2: device and rendezvous ..., 120 s ago",
        "engine 2: its actor has not started",
    ]


def engine(reference: str) -> SimpleNamespace:
    ready = SimpleNamespace(remote=lambda: reference)
    ready.options = lambda max_task_retries: ready  # until the actor is dead
    return SimpleNamespace(__ray_ready__=ready)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    fake = MagicMock()
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


def test_the_wait_is_for_all_and_its_deadline_for_engines(
    ray: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env_vars.ENGINE_TIMEOUT, "60")
    limits = []

    def wait(pending: list[str], num_returns: int, timeout: float | None) -> tuple[list[str], list[str]]:
        limits.append(timeout)
        return pending[:num_returns], pending[num_returns:]

    ray.wait.side_effect = wait
    startup.wait_for_engine_startup([engine("up")], ["model"])
    assert [call.args[0] for call in ray.get.call_args_list] == [["up"], ["model"]]
    assert limits[0] is not None
    assert 0 < limits[0] <= 60
    assert limits[1] is None


def test_the_first_error_is_raised(ray: MagicMock) -> None:
    ray.wait.side_effect = lambda pending, **_: (pending[:1], pending[1:])
    ray.get.side_effect = RuntimeError("the engine's own error")
    with pytest.raises(RuntimeError, match="the engine's own error"):
        startup.wait_for_engine_startup([engine("dead")], ["model"])


def test_late_engine_is_an_error_with_its_steps(ray: MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.ENGINE_TIMEOUT, "0.01")
    monkeypatch.setattr(
        startup, "_last_steps", lambda engines: [f"engine {index}: late" for index in engines]
    )
    ray.wait.side_effect = lambda pending, **_: ([], pending)
    with pytest.raises(
        startup.StartError, match=r"engines \[0\] are not up after 0.01 s.*\n  engine 0: late"
    ):
        startup.wait_for_engine_startup([engine("slow")])


def test_a_late_engine_is_the_error_also_if_the_steps_are_unknown(
    ray: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcs_kv, "list_records", MagicMock(side_effect=TimeoutError("the head is busy")))
    assert "engines [0] are not up" in str(startup.late([0]))
    assert "last steps are unknown, because Ray's head does not report them: the head is busy" in str(
        startup.late([0])
    )


def test_a_step_that_cannot_be_stored_does_not_end_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gcs_kv, "put_record", MagicMock(side_effect=TimeoutError("the head is busy")))
    monkeypatch.setattr(gcs_kv, "_warned", threading.Event())
    monkeypatch.setenv(startup.ENGINE, "01/2")
    done = []
    with startup.step("model loaded", 0):
        done.append(True)
    assert done
    (warning,) = caplog.records
    assert "did not store '01/engine 2 rank 0'" in warning.getMessage()


def test_an_engine_that_is_replaced_is_waited_for_instead(
    ray: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env_vars.ENGINE_TIMEOUT, "60")
    done = ["up"]
    ray.wait.side_effect = lambda pending, **_: (
        [one for one in pending if one in done][:1],
        [one for one in pending if one not in done],
    )
    engines, new = [engine("lost"), engine("up")], engine("replacement")

    def check(missing: Sequence[int]) -> dict[int, SimpleNamespace]:
        assert list(missing) == [0]
        done.append("replacement")
        return {0: new}

    startup.wait_for_engine_startup(engines, [], check)
    assert engines[0] is new
    assert [call.args[0] for call in ray.get.call_args_list] == [["up"], [], ["replacement"]]


def test_an_engine_without_a_place_is_not_awaited(ray: MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.ENGINE_TIMEOUT, "60")
    ray.wait.side_effect = lambda pending, **_: (
        [one for one in pending if one == "up"],
        [one for one in pending if one != "up"],
    )
    engines = [engine("lost"), engine("up")]
    lost = engines[0]
    startup.wait_for_engine_startup(engines, [], dict.fromkeys)
    assert engines[0] is lost


def test_an_engine_that_is_lost_after_its_start_is_replaced_while_the_models_load(
    ray: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env_vars.ENGINE_TIMEOUT, "60")
    done, seen = ["up"], []
    engines, new = [engine("up")], engine("replacement")

    def wait(pending: list[str], num_returns: int, timeout: float | None) -> tuple[list[str], list[str]]:
        assert timeout is not None, "the trainer may wait for the engine"
        ready = [one for one in pending if one in done][:num_returns]
        return ready, [one for one in pending if one not in ready]

    def check(missing: Sequence[int]) -> dict[int, SimpleNamespace]:
        seen.append(list(missing))
        done.extend(["replacement", "model"] if len(seen) == 2 else [])
        return {0: new} if len(seen) == 1 else {}

    ray.wait.side_effect = wait
    startup.wait_for_engine_startup(engines, ["model"], check)
    assert engines == [new]
    assert seen == [[], [0]]


def test_the_time_of_the_others_starts_again_when_an_engine_is_given_up(
    ray: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its place may have been awaited for longer than an engine's start may last."""
    monkeypatch.setenv(env_vars.ENGINE_TIMEOUT, "60")
    monkeypatch.setattr(startup, "_last_steps", lambda _: [])
    now = [0.0]
    given_up: list[int] = []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def wait(pending: list[str], **_: object) -> tuple[list[str], list[str]]:
        now[0] += 1
        return [], pending

    def check(missing: Sequence[int]) -> dict[int, None]:
        if given_up:
            return {}
        given_up.append(0)
        now[0] += 120
        return {0: None}

    ray.wait.side_effect = wait
    with pytest.raises(startup.StartError, match=r"engines \[1\] are not up after 60 s"):
        startup.wait_for_engine_startup([engine("lost"), engine("slow")], [], check)
    assert now == [121 + 61]


@pytest.mark.parametrize(
    ("codes", "before", "allowed", "ends"),
    [
        ("{'EngineCore_DP0': -9}", 1, 2, True),
        ("{'EngineCore_DP0': -9}", 1, 1, False),
        ("{'EngineCore_DP0': -9}", 0, 0, False),
        ("{}", 0, 2, True),
        ("{}", 1, 2, False),
        ("{'EngineCore_DP0': 1}", 0, 2, False),
    ],
    ids=["killed", "none is left", "not allowed", "unknown", "unknown again", "its own error"],
)
def test_an_engine_whose_process_is_killed_while_it_starts_is_restarted(
    monkeypatch: pytest.MonkeyPatch, codes: str, before: int, allowed: int, ends: bool
) -> None:
    monkeypatch.setattr(startup, "keep_byte_level_tokenizers", lambda: None)
    monkeypatch.setenv(env_vars.ENGINE_RESTARTS, str(allowed))
    end = MagicMock()
    monkeypatch.setattr(restarted, "end_process", end)
    monkeypatch.setattr(restarted, "number", lambda: before)
    error = RuntimeError(f"See root cause above. Failed core proc(s): {codes}")
    engine_class = SimpleNamespace(from_engine_args=MagicMock(side_effect=error))
    with pytest.raises(RuntimeError, match="See root cause above"):
        asyncio.run(startup.start_engine(engine_class, None))
    assert end.called == ends


def test_no_step_is_reported_outside_an_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(startup.ENGINE, raising=False)
    with startup.step("model loaded", 0):
        pass
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("reconstructed", "noted"), [(True, [2]), (False, [])])
def test_a_process_that_was_lost_in_its_place_is_noted_before_its_restart_is_counted(
    ray: MagicMock, monkeypatch: pytest.MonkeyPatch, reconstructed: bool, noted: list[int]
) -> None:
    """The first process of an engine that has moved follows the loss of its former node, noted elsewhere."""
    context = ray.get_runtime_context.return_value
    context.was_current_actor_reconstructed = reconstructed
    context.get_job_id.return_value = "job"
    done: list[str] = []
    found: list[int] = []
    monkeypatch.setenv(startup.ENGINE, "")  # removed after the test
    monkeypatch.setattr(resource_tracker, "detach", MagicMock())
    monkeypatch.setattr(actor_registry, "register_actor", MagicMock())
    monkeypatch.setattr(startup, "report_step", MagicMock())
    monkeypatch.setattr(recipes, "load", lambda _: {"moved": True, "sleeps": False})
    monkeypatch.setattr(recipes, "note_lost_process", found.append)
    monkeypatch.setattr(restarted, "end_former_processes", MagicMock())
    monkeypatch.setattr(restarted, "begin", lambda *_: done.append(f"counted after {found}"))
    assert startup.begin(2) == "job/2"
    assert (found, done) == (noted, [f"counted after {noted}"])
