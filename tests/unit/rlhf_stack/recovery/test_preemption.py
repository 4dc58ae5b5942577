"""Checkpoints on request: the records of request and answer, and the trainer between and in its steps."""

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from rlhf_stack.cli import supervised
from rlhf_stack.cli.commands import checkpoint
from rlhf_stack.cluster import gcs_kv
from rlhf_stack.errors import UserError
from rlhf_stack.recovery import checkpoint_on_request, job, preemption
from rlhf_stack.recovery.checkpoint_on_request import Progress
from rlhf_stack.recovery.job import Ended
from rlhf_stack.recovery.preemption import Answer, Request
from rlhf_stack.recovery.supervisor import Limits, Supervisor
from rlhf_stack.telemetry import events, run_log

ASKED = Request("one", "01", 20.0)


@pytest.fixture(autouse=True)
def records(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    stored: dict[str, dict[str, Any]] = {}
    monkeypatch.setattr(gcs_kv, "put_record", stored.__setitem__)
    monkeypatch.setattr(
        gcs_kv, "list_records", lambda key: [stored[one] for one in sorted(stored) if one.startswith(key)]
    )
    monkeypatch.setattr(preemption, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(checkpoint_on_request, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(checkpoint_on_request, "_progress", Progress())
    monkeypatch.setattr(checkpoint_on_request, "_watched", {"01"})  # the tests call `save` themselves
    return stored


@pytest.fixture
def emitted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(events, "emit", lambda event, **fields: found.append((event, fields)))
    return found


class Trainer:
    """OpenRLHF's trainer as far as the decorators see it; ``saved`` are its calls of ``save_checkpoint``."""

    best_eval_metric_key, best_eval_metric_value, _latest_eval_metric_value = "reward", 0.5, 0.25

    def __init__(self, save_steps: float = float("inf"), disable_ds: bool = False) -> None:
        self.args = SimpleNamespace(ckpt=SimpleNamespace(save_steps=save_steps, disable_ds=disable_ds))
        self.saved: list[tuple[str, dict[str, Any]]] = []
        self.actor_model_group = SimpleNamespace(async_run_method=self.call("actor"))
        self.critic_model_group = SimpleNamespace(async_run_method=self.call("critic"))
        self.training = threading.Event()
        self.may_end = threading.Event()

    def call(self, role: str) -> Callable[..., list[None]]:
        def called(method: str, **options: Any) -> list[None]:
            assert method == "save_checkpoint"
            self.saved.append((role, options))
            return [None]

        return called

    @checkpoint_on_request.begins_step
    def train_step(self) -> None:
        self.training.set()
        assert self.may_end.wait(10)

    @checkpoint_on_request.uses_models
    def save_best_checkpoint(self) -> None:
        """Call the ranks between two steps."""

    @checkpoint_on_request.ends_step
    def save_logs_and_checkpoints(
        self, step: int, logs: dict[str, Any] | None, client_states: dict[str, Any] | None
    ) -> None:
        """Record a step."""


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    fake = MagicMock()
    fake.is_initialized.return_value = True
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    trainer = Trainer()
    yield trainer
    trainer.may_end.set()


def withdraw_when_answered(records: dict[str, dict[str, Any]]) -> threading.Thread:
    """Put the request, and withdraw it after the job's last answer, as `preemption.request` does."""
    records[preemption.REQUESTS + ASKED.id] = {"id": ASKED.id, "job": ASKED.job, "seconds": ASKED.seconds}

    def act() -> None:
        end = time.monotonic() + 10
        while not records.get("preemption/answers/one/01", {}).get("done") and time.monotonic() < end:
            time.sleep(0.01)
        records[preemption.REQUESTS + ASKED.id] = {}

    thread = threading.Thread(target=act)
    thread.start()
    return thread


def test_the_last_step_is_saved_with_its_states_while_no_step_trains(
    trainer: Trainer, records: dict[str, dict[str, Any]], emitted: list[tuple[str, dict[str, Any]]]
) -> None:
    trainer.save_logs_and_checkpoints(5, {}, {"episode": 1, "global_step": 5})
    sender = withdraw_when_answered(records)
    reply = checkpoint_on_request.save(trainer, ASKED, "01")
    sender.join()
    assert (reply.saved, reply.step) == (True, 5)
    (actor, with_states), (critic, without) = trainer.saved
    assert (actor, critic) == ("actor", "critic")
    assert with_states["tag"] == without["tag"] == "global_step5"
    assert with_states["client_states"] == {
        **{"episode": 1, "global_step": 5},
        **{"best_eval_metric_key": "reward", "best_eval_metric_value": 0.5, "latest_eval_metric_value": 0.25},
    }
    assert (without["metric_key"], without["metric_value"]) == ("reward", 0.25)
    assert [(name, fields["step"], fields["saved"]) for name, fields in emitted] == [("preemption", 5, True)]


def test_a_step_that_was_just_saved_is_not_saved_again(records: dict[str, dict[str, Any]]) -> None:
    trainer = Trainer(save_steps=5)
    trainer.save_logs_and_checkpoints(10, {}, {})
    sender = withdraw_when_answered(records)
    assert checkpoint_on_request.save(trainer, ASKED, "01").step == 10
    sender.join()
    assert trainer.saved == []


def test_two_requests_between_two_steps_save_once(
    trainer: Trainer, records: dict[str, dict[str, Any]]
) -> None:
    trainer.save_logs_and_checkpoints(5, {}, {})
    for _ in range(2):
        records.clear()
        sender = withdraw_when_answered(records)
        assert checkpoint_on_request.save(trainer, ASKED, "01").saved
        sender.join()
    assert len(trainer.saved) == 2, "actor and critic, once"


def test_a_request_during_a_step_is_served_at_the_end_of_that_step(
    trainer: Trainer, records: dict[str, dict[str, Any]]
) -> None:
    trainer.save_logs_and_checkpoints(1, {}, {})

    def step() -> None:
        trainer.train_step()
        trainer.save_logs_and_checkpoints(2, {}, {"global_step": 2})

    training = threading.Thread(target=step)
    training.start()
    assert trainer.training.wait(10)
    sender = withdraw_when_answered(records)
    replies: list[Answer] = []
    saving = threading.Thread(target=lambda: replies.append(checkpoint_on_request.save(trainer, ASKED, "01")))
    saving.start()
    assert not trainer.saved
    trainer.may_end.set()
    for thread in (training, saving, sender):
        thread.join(20)
    assert [(reply.saved, reply.step) for reply in replies] == [(True, 2)]
    assert trainer.saved[0][1]["client_states"]["global_step"] == 2


def test_no_step_begins_until_the_request_is_withdrawn(
    trainer: Trainer, records: dict[str, dict[str, Any]]
) -> None:
    trainer.save_logs_and_checkpoints(1, {}, {})
    records[preemption.REQUESTS + ASKED.id] = {"id": "one", "job": "01", "seconds": ASKED.seconds}
    saving = threading.Thread(target=checkpoint_on_request.save, args=(trainer, ASKED, "01"))
    saving.start()
    end = time.monotonic() + 10
    while "preemption/answers/one/01" not in records and time.monotonic() < end:
        time.sleep(0.01)
    training = threading.Thread(target=trainer.train_step)
    training.start()
    assert not trainer.training.wait(0.3)
    records[preemption.REQUESTS + ASKED.id] = {}
    assert trainer.training.wait(10)
    trainer.may_end.set()
    training.join()
    saving.join()


def test_a_step_that_does_not_end_in_time_is_not_saved(trainer: Trainer) -> None:
    training = threading.Thread(target=trainer.train_step)
    training.start()
    assert trainer.training.wait(10)
    reply = checkpoint_on_request.save(trainer, Request("one", "01", 0.0), "01")
    assert (reply.done, reply.saved, reply.problem) == (True, False, "the step does not end in time")
    trainer.may_end.set()
    training.join()


def test_a_checkpoint_that_took_longer_before_is_not_begun(trainer: Trainer) -> None:
    trainer.save_logs_and_checkpoints(1, {}, {})
    checkpoint_on_request._progress.longest = 90.0
    reply = checkpoint_on_request.save(trainer, ASKED, "01")
    assert reply.problem == "20 s are left, and the longest checkpoint took 90 s"
    assert trainer.saved == []


def test_nothing_is_saved_after_the_training(trainer: Trainer) -> None:
    """The driver saves the trained models then, by collectives of the same ranks."""

    @checkpoint_on_request.trains
    def fit() -> str:
        trainer.save_logs_and_checkpoints(1, {}, {})
        return "done"

    assert fit() == "done"
    reply = checkpoint_on_request.save(trainer, ASKED, "01")
    assert (reply.done, reply.saved, reply.problem) == (True, False, "the training has ended")
    assert trainer.saved == []


@pytest.mark.parametrize("following", ["train_step", "save_best_checkpoint", "the end"])
def test_a_run_ends_with_the_error_of_a_save_on_request(
    following: str,
    trainer: Trainer,
    records: dict[str, dict[str, Any]],
    ray: MagicMock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It called the ranks again, of which those that had written their shard still waited for the others."""
    ray.exceptions.RayError = type("RayError", (Exception,), {})
    monkeypatch.setitem(sys.modules, "ray.exceptions", ray.exceptions)
    ray.get.side_effect = OSError("rank 0 on node one: no space left on device")

    @checkpoint_on_request.trains
    def fit() -> None:
        trainer.save_logs_and_checkpoints(5, {}, {})
        for _ in range(2):  # the second one would wait for the ranks with the models held
            checkpoint_on_request._handle(trainer, ASKED, "01", time.monotonic())
        ray.get.assert_called_once()
        if following != "the end":
            getattr(trainer, following)()

    trainer.may_end.set()
    with pytest.raises(OSError, match="rank 0 on node one: no space left on device"):
        fit()
    assert not trainer.training.is_set()
    reply = records["preemption/answers/one/01"]
    assert (reply["saved"], reply["problem"]) == (False, "rank 0 on node one: no space left on device")


def test_checkpoints_that_are_off_stay_off() -> None:
    trainer = Trainer(disable_ds=True)
    trainer.save_logs_and_checkpoints(1, {}, {})
    reply = checkpoint_on_request.save(trainer, ASKED, "01")
    assert reply.problem == "--ckpt.disable_ds turns checkpoints off"
    assert trainer.saved == []


def test_a_request_returns_the_last_answer_of_its_job(
    records: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reply(_: float) -> None:
        (asked,) = preemption.open_requests("01")
        confirmed = f"preemption/answers/{asked.id}/01" in records
        preemption.answer(asked, Answer("01", done=confirmed, saved=confirmed, step=3, seconds=2.0))

    monkeypatch.setattr(time, "sleep", reply)
    (found,) = preemption.request(30.0, "01")
    assert preemption.describe([found]) == ["the checkpoint of step 3 was saved in 2 s"]
    assert preemption.open_requests("01") == []
    preemption.request(30.0, "01", may_continue=False)
    assert len(preemption.open_requests("01")) == 1


def test_requests_at_the_same_time_are_confirmed_at_once(
    trainer: Trainer, records: dict[str, dict[str, Any]], ray: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when two machines are taken away: the second one waits for the save of the first."""
    trainer.save_logs_and_checkpoints(5, {}, {})
    for name in ("RayError", "GetTimeoutError"):
        setattr(ray.exceptions, name, type(name, (Exception,), {}))
    monkeypatch.setitem(sys.modules, "ray.exceptions", ray.exceptions)
    saving, may_end = threading.Event(), threading.Event()

    def save(_: Trainer) -> None:
        saving.set()
        assert may_end.wait(10)

    monkeypatch.setattr(checkpoint_on_request, "_save", save)
    serving = threading.Thread(target=checkpoint_on_request._serve, args=(trainer, "01", set()))
    serving.start()
    found: dict[str, list[Answer]] = {}

    def ask(name: str) -> None:
        found[name] = preemption.request(20.0, "01")

    first = threading.Thread(target=ask, args=("first",))
    first.start()
    assert saving.wait(10)
    second = threading.Thread(target=ask, args=("second",))
    second.start()
    end = time.monotonic() + 10
    while sum(key.startswith(preemption.ANSWERS) for key in records) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    confirmed = [record for key, record in records.items() if key.startswith(preemption.ANSWERS)]
    assert [one["done"] for one in confirmed] == [False, False]
    may_end.set()
    first.join()
    second.join()
    ray.is_initialized.return_value = False
    serving.join()
    assert [(reply.saved, reply.step) for replies in found.values() for reply in replies] == [(True, 5)] * 2


def test_a_run_that_does_not_confirm_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "CONFIRM_SECONDS", 0.05)
    begun = time.monotonic()
    assert preemption.request(60.0, "01") == []
    assert time.monotonic() - begun < 30


def test_a_confirmed_request_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def confirm(_: float) -> None:
        preemption.answer(preemption.open_requests("01")[0], Answer("01"))

    monkeypatch.setattr(time, "sleep", confirm)
    assert preemption.describe(preemption.request(0.2, "01")) == ["the checkpoint was not complete in time"]


def test_requests_reach_their_job_only(records: dict[str, dict[str, Any]]) -> None:
    for name, known in (("one", "01"), ("two", "02"), ("all", "")):
        records[preemption.REQUESTS + name] = {"id": name, "job": known, "seconds": 1.0}
    records[preemption.REQUESTS + "withdrawn"] = {}
    assert {one.id for one in preemption.open_requests("01")} == {"one", "all"}


@pytest.mark.parametrize(
    ("replies", "code", "printed"),
    [
        (
            [Answer("1", done=True, saved=True, step=4, seconds=3.0)],
            0,
            "the checkpoint of step 4 was saved in 3 s",
        ),
        ([Answer("1", done=True, problem="a full disk")], 1, "no checkpoint was saved: a full disk"),
        ([Answer("1")], 1, "the checkpoint was not complete in time"),
    ],
)
def test_the_command_ends_by_what_was_saved(
    replies: list[Answer],
    code: int,
    printed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(checkpoint, "connected", MagicMock())
    monkeypatch.setattr(preemption, "request", {25.0: replies}.__getitem__)
    options = argparse.Namespace(ray="auto", within=25.0, json=False)
    assert checkpoint.run(options) == code
    assert capsys.readouterr().out == f"job 1: {printed}\n"
    options.json = True
    assert checkpoint.run(options) == code
    assert json.loads(capsys.readouterr().out)["runs"] == [asdict(reply) for reply in replies]


def test_the_command_without_an_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "connected", MagicMock())
    monkeypatch.setattr(preemption, "request", {25.0: []}.__getitem__)
    with pytest.raises(UserError, match="no run answered"):
        checkpoint.run(argparse.Namespace(ray="auto", within=25.0, json=False))


class Checkpoints:
    """The checkpoints of a run whose step 4 is complete."""

    loads, every, load_flag, folder = False, 0, "--load", Path("/ckpt")

    def complete_steps(self, since: float, loaded: int) -> set[int]:
        assert since
        assert not loaded
        return {4}

    def select(self, step: int, since: float, loaded: int) -> list[Path]:
        assert since
        return [Path(f"incomplete-after-{step}")]


@pytest.mark.parametrize(
    ("after", "described"),
    [
        ("x --a 2 --b", ""),
        ("x --a 2 --b --load", " with --load"),
        ("x --a 1 --b --load --universal", " with --a 1 --load --universal"),
        ("x --a 2", " without --b"),
        ("x --a 1 --load", " with --a 1 --load without --b"),
    ],
)
def test_the_changes_of_a_command_line_are_described(after: str, described: str) -> None:
    assert supervised.described_changes(["x", "--a", "2", "--b"], after.split()) == described


@pytest.mark.parametrize("grace", [0.0, 30.0])
def test_a_run_that_is_terminated_saves_within_the_grace_time_and_is_stopped(
    grace: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_log.configure_messages()
    asked: list[tuple[float, str]] = []

    def request(seconds: float, known: str, may_continue: bool) -> list[Answer]:
        assert not may_continue
        asked.append((seconds, known))
        return [Answer(known, done=True, saved=True, step=4, seconds=2.0)]

    def supervise(self: Supervisor) -> Ended:
        self.state.job = "raysubmit_1"
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("SIGTERM was ignored")

    stopped = MagicMock()
    monkeypatch.setattr(supervised, "checkpoints_of", lambda _: (MagicMock(flat=False), Checkpoints()))
    monkeypatch.setattr(supervised, "RayCluster", MagicMock(return_value=MagicMock(recall=lambda: None)))
    monkeypatch.setattr(supervised, "connected", MagicMock())
    monkeypatch.setattr(job, "ray_job", lambda server, name, _seconds: f"{server} {name}")
    monkeypatch.setattr(job, "stop", stopped)
    monkeypatch.setattr(preemption, "request", request)
    monkeypatch.setattr(Supervisor, "supervise", supervise)
    run = supervised.Supervision("server", "auto", ["x"], Limits(0, grace=grace), lambda *_: [], dict)
    with pytest.raises(UserError) as ended, supervised.terminable():
        run.run(print)
    assert ended.value.code == 143
    stopped.assert_called_once_with("server", "raysubmit_1")
    printed = capsys.readouterr().err
    if not grace:
        assert asked == []
        assert printed == "rlhf-stack: stopping job raysubmit_1\n"
        return
    ((seconds, known),) = asked
    assert known == "server raysubmit_1"
    assert grace - 5 < seconds <= grace - supervised.STOP_SECONDS
    assert printed.splitlines() == [
        "rlhf-stack: a checkpoint is requested, within 30 s",
        "rlhf-stack: the checkpoint of step 4 was saved in 2 s",
        "rlhf-stack: stopping job raysubmit_1",
        "rlhf-stack: an incomplete checkpoint was set aside: incomplete-after-4",
        "rlhf-stack: the same command with --load continues from the checkpoint of step 4",
    ]
