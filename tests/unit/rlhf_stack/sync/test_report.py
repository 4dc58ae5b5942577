"""Records of a sync: its log line, metrics, and warnings of slow engines."""

from typing import Any

import pytest
from rlhf_stack.cluster import run_metrics
from rlhf_stack.sync import report
from rlhf_stack.telemetry.throughput import Work


@pytest.fixture(autouse=True)
def published(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], float]:
    """The metrics that are published, by name and tag."""
    values: dict[tuple[str, str], float] = {}
    monkeypatch.setattr(run_metrics, "publish", values.update)
    return values


def answer(engine: int, seconds: list[float], work: Work) -> dict[str, Any]:
    workers = [f"rank {engine * 2 + index + 1} on 10.0.0.{engine + 1}" for index in range(len(seconds))]
    ranks = [
        {"who": name, "seconds": took, "loading": 0.1} for name, took in zip(workers, seconds, strict=True)
    ]
    return {"ranks": ranks, "work": work}


def test_a_sync_is_a_log_line_with_its_slowest_worker(
    capsys: pytest.CaptureFixture[str], published: dict[tuple[str, str], float]
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
    assert {name for name, _ in published} == set(run_metrics.SYNC_METRICS)
    assert published["rlhf_stack_sync_seconds", "gloo"] == 0.5
    assert published["rlhf_stack_sync_sent_bytes", "gloo"] == 20_000_000
    assert published["rlhf_stack_engine_tokens_per_second", "2"] == 3000.0


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
