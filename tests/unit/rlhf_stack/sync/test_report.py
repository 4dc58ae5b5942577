"""Records of a sync: its log line, metrics, and warnings of slow engines."""

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from rlhf_stack.sync import report
from rlhf_stack.telemetry.throughput import Work


@pytest.fixture(autouse=True)
def gauges(monkeypatch: pytest.MonkeyPatch) -> dict[str, MagicMock]:
    """Replace Ray's gauges; return the created ones by name."""
    created: dict[str, MagicMock] = {}

    def gauge(name: str, **_: object) -> MagicMock:
        return created.setdefault(name, MagicMock())

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "ray.util", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray.util.metrics", SimpleNamespace(Gauge=gauge))
    report._gauge.cache_clear()
    return created


def answer(engine: int, seconds: list[float], work: Work) -> dict[str, Any]:
    workers = [f"rank {engine * 2 + index + 1} on 10.0.0.{engine + 1}" for index in range(len(seconds))]
    ranks = [
        {"who": name, "seconds": took, "loading": 0.1} for name, took in zip(workers, seconds, strict=True)
    ]
    return {"ranks": ranks, "work": work}


def test_a_sync_is_a_log_line_with_its_slowest_worker(
    capsys: pytest.CaptureFixture[str], gauges: dict[str, MagicMock]
) -> None:
    fine = Work(6000, 2.0)
    answers = {0: answer(0, [0.4, 0.3], fine), 2: answer(1, [0.45, 0.2], fine)}
    fields = report.report_sync(3, "gloo", 1_000_000_000, 0.5, answers, 20_000_000)
    assert fields["gigabytes_per_second"] == 2.0
    assert fields["slowest"]["who"] == "rank 3 on 10.0.0.2"
    line = capsys.readouterr().out.strip()
    assert line == (
        "rlhf_stack: weight sync 3 over gloo: 1000.0 MB in 0.50 s, 2.00 GB/s; sent as 20.0 MB of changes; "
        "slowest rank 3 on 10.0.0.2, which loaded for 0.10 s"
    )
    assert set(gauges) == set(report.SYNC_METRICS)
    gauges["rlhf_stack_sync_seconds"].set.assert_called_once_with(0.5, tags={"backend": "gloo"})
    gauges["rlhf_stack_sync_sent_bytes"].set.assert_called_once_with(20_000_000, tags={"backend": "gloo"})
    gauges["rlhf_stack_engine_tokens_per_second"].set.assert_called_with(3000.0, tags={"engine": "2"})


def test_a_sync_without_answers_is_a_log_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.report_sync(0, "ipc", 5_000_000, 0.5, {}, 5_000_000)["slowest"] is None
    assert capsys.readouterr().out.strip().endswith("5.0 MB in 0.50 s, 0.01 GB/s")


def test_a_slow_engine_is_warned_of_with_its_workers(caplog: pytest.LogCaptureFixture) -> None:
    """By its index: engine 1 is lost."""
    answers = {engine: answer(engine, [0.1, 0.1], Work(60000, 10.0)) for engine in (0, 2)}
    answers[3] = answer(3, [0.1, 0.1], Work(15000, 10.0))
    report.report_sync(0, "gloo", 1, 1.0, answers, 1)
    (text,) = [record.message for record in caplog.records]
    assert "engine 3 generates 1500 tokens/s, less than half of the median" in text
    assert "rank 7 on 10.0.0.4, rank 8 on 10.0.0.4" in text


def test_parameters_that_are_never_sent_are_logged_once(capsys: pytest.CaptureFixture[str]) -> None:
    answers = {engine: answer(engine, [0.1, 0.1], Work(6000, 2.0)) for engine in (0, 1)}
    assert report.unsent_parameters(answers) == []
    for ranks in (each["ranks"] for each in answers.values()):
        ranks[0]["unsent"] = [f"visual.{index}" for index in range(5)]
        ranks[1]["unsent"] = ["visual.1", "router.bias"]
    names = ["router.bias", *(f"visual.{index}" for index in range(5))]
    assert report.unsent_parameters(answers) == report.unsent_parameters(answers) == names
    assert capsys.readouterr().out.splitlines() == [
        "rlhf_stack: weight sync: the trainer sends nothing for 6 parameters of the engines, which keep "
        "their values: router.bias, visual.0, visual.1 and 3 more"
    ]
