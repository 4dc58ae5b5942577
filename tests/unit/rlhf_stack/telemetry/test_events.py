import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from rlhf_stack.config import env_vars
from rlhf_stack.telemetry import events


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(env_vars.EVENTS, str(tmp_path / "events"))
    return tmp_path / "events"


def test_without_the_variable_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env_vars.EVENTS, raising=False)
    monkeypatch.chdir(tmp_path)
    events.phase("started")
    assert list(tmp_path.iterdir()) == []


def test_event_has_name_time_host_and_pid(directory: Path) -> None:
    events.emit("sync", index=0, bytes=12)
    (event,) = events.read(directory)
    assert event["event"] == "sync"
    assert event["bytes"] == 12
    assert {"time", "host", "pid"} <= set(event)


def test_nan_becomes_null(directory: Path) -> None:
    events.step(1, {"rollout/reward_mean": float("nan"), "grad": float("inf"), "loss": 2})
    (event,) = events.read(directory)
    assert event["reward"] is None
    assert event["grad"] is None
    assert event["loss"] == 2.0


def test_step_has_numbers_only_and_prefers_the_rollouts_reward(directory: Path) -> None:
    logs = {"reward": 0.1, "rollout/reward_mean": 0.5, "generated_samples": ["text"], "flag": True}
    events.step(7, logs)
    (event,) = events.read(directory)
    assert event["step"] == 7
    assert event["reward"] == 0.5
    assert "generated_samples" not in event
    assert "flag" not in event


def test_a_metric_with_the_name_of_a_field_of_each_event_is_dropped(directory: Path) -> None:
    """A reward function may log the latency of its sandbox as "time"."""
    events.step(7, {"reward": 0.5, "event": 1, "time": 0.3, "pid": 2})
    (event,) = events.read(directory)
    assert (event["event"], event["pid"], event["reward"]) == ("step", os.getpid(), 0.5)
    assert event["time"] > 1e9


def _write_many(number: int) -> None:
    for index in range(200):
        events.emit("step", number=number, index=index, filler="x" * 500)


def test_lines_of_concurrent_processes_do_not_mix(directory: Path) -> None:
    processes = [multiprocessing.Process(target=_write_many, args=(number,)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    found = events.read(directory)
    assert len(list(directory.glob("*.jsonl"))) == 3
    assert {(event["number"], event["index"]) for event in found} == {
        (number, index) for number in range(3) for index in range(200)
    }
    assert [event["time"] for event in found] == sorted(event["time"] for event in found)


def test_incomplete_last_line_is_ignored(tmp_path: Path) -> None:
    whole = json.dumps({"event": "phase", "time": 1.0})
    (tmp_path / "host-1.jsonl").write_text(f"{whole}\n{whole[:9]}")
    assert len(events.read(tmp_path)) == 1


@pytest.mark.parametrize("read", [events.read, events.read_recent])
def test_only_files_are_read(tmp_path: Path, read: Callable[[Path], list[dict[str, Any]]]) -> None:
    """To open a pipe without a writer would wait for ever."""
    (tmp_path / "host-1.jsonl").write_text('{"event": "phase", "time": 1.0}\n')
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "link.jsonl").symlink_to("missing")
    assert len(read(tmp_path)) == 1


def test_a_file_that_cannot_be_read_or_vanishes_has_no_recent_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended `top`."""
    for name in ("a", "unreadable", "vanishing", "vanished"):
        (tmp_path / f"{name}.jsonl").write_text('{"event": "phase", "time": 1.0}\n')
    plain_open, plain_stat = Path.open, Path.stat

    def opened(path: Path, *arguments: Any) -> Any:
        if path.stem in ("unreadable", "vanishing"):
            raise PermissionError(path) if path.stem == "unreadable" else FileNotFoundError(path)
        return plain_open(path, *arguments)

    def status(path: Path, **arguments: Any) -> os.stat_result:
        if path.stem == "vanished":
            raise FileNotFoundError(path)
        return plain_stat(path, **arguments)

    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr(Path, "stat", status)
    assert len(events.read_recent(tmp_path)) == 1
    assert events.read_recent(tmp_path / "no folder") == []


def test_engines_are_recorded_with_their_nodes(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = MagicMock()
    ray.get.return_value = [
        [{"rank": 0, "node_id": "a"}, {"rank": 1, "node_id": "a"}],
        [{"rank": 0, "node_id": "a"}, {"rank": 1, "node_id": "b"}],
    ]
    monkeypatch.setitem(sys.modules, "ray", ray)
    events.models_up([MagicMock(), MagicMock()])
    engines = [event for event in events.read(directory) if event["event"] == "engine"]
    assert [event["straddles"] for event in engines] == [False, True]
    assert [event["engine"] for event in engines] == [0, 1]
    lost = "lost"
    events.models_up([lost, "engine", "engine"], lambda one: None if one is lost else [{"node_id": "a"}])
    engines = [event for event in events.read(directory) if event["event"] == "engine"]
    assert [event["engine"] for event in engines] == [0, 1, 1, 2]


def test_a_disk_that_refuses_events_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(env_vars.EVENTS, str(tmp_path / "file" / "events"))
    for _ in range(3):
        events.phase("started")
    (record,) = caplog.records
    assert "events are not recorded in" in record.message


def test_a_line_that_was_written_in_part_is_skipped(directory: Path) -> None:
    events.emit("first")
    (file,) = directory.iterdir()
    with file.open("a") as opened:
        opened.write('{"event": "cut')
        opened.write('{"event": "joined to it"}\n')
    events.emit("last")
    assert [event["event"] for event in events.read(directory)] == ["first", "last"]


def test_what_is_no_event_is_skipped(tmp_path: Path) -> None:
    good = b'{"event": "step", "time": 1.0, "step": 1}\n'
    bad = [b"[]", b"3", b"{}", b'{"event": "x"}', b'{"event": 3, "time": 1}', b"\xff\xfe", b"[" * 100_000]
    bad += [b'{"event": "x", "time": "soon"}', b'{"event": "x", "time": NaN}', b'{"event": "x", "time": [1]}']
    (tmp_path / "a.jsonl").write_bytes(b"".join(line + b"\n" for line in bad) + good + good[:-1])
    assert [event["step"] for event in events.read(tmp_path)] == [1]
    assert events.read_recent(tmp_path) == events.read(tmp_path)


def test_the_recent_events_of_a_long_run_take_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`top` read the whole history every two seconds."""
    lines = [json.dumps({"event": "step", "time": float(step), "step": step}) for step in range(5000)]
    first = json.dumps({"event": "engine", "time": 0.0, "engine": 0, "ranks": []})
    (tmp_path / "a.jsonl").write_text("\n".join([first, *lines]) + "\n")
    monkeypatch.setattr(events, "END_BYTES", 1000)
    found = events.read_recent(tmp_path)
    assert found[0]["event"] == "engine"
    assert found[-1]["step"] == 4999
    assert len(found) < 60


def test_upstream_logs_further_values_with_the_next_step_alone() -> None:
    logs: list[dict[str, float]] = [{"loss": 2.0}, {"loss": 1.0}]
    events.log_with_step({"weights/version": 3})
    for number, each in enumerate(logs, 1):
        events.step(number, each)
    assert logs == [{"loss": 2.0, "weights/version": 3}, {"loss": 1.0}]
