"""The metrics of a run: exported again and again by Ray, and recorded for `rlhf-stack top`."""

import atexit
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from rlhf_stack.cluster import gcs_kv, run_metrics

RESTARTS, VERSION = "rlhf_stack_engine_restarts", "rlhf_stack_weight_version"
SECONDS = 30


@pytest.fixture(autouse=True)
def records(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Replace the GCS."""
    stored: dict[str, dict[str, Any]] = {}
    monkeypatch.setattr(gcs_kv, "report_record", lambda key, record: stored.update({key: record}))
    monkeypatch.setattr(gcs_kv, "list_keys", lambda prefix: [key for key in stored if key.startswith(prefix)])
    monkeypatch.setattr(
        gcs_kv, "list_records", lambda prefix: [stored[key] for key in stored if key.startswith(prefix)]
    )
    return stored


def run_in(monkeypatch: pytest.MonkeyPatch, job: str, worker: str) -> None:
    """Make this the process ``worker`` of Ray's ``job``."""
    context = SimpleNamespace(get_job_id=lambda: job, get_worker_id=lambda: worker)
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", ray)


@pytest.fixture(autouse=True)
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, float, dict[str, str]]]]:
    """Replace Ray; return what its gauges are set to."""
    values: list[tuple[str, float, dict[str, str]]] = []

    def gauge(name: str, **_: object) -> SimpleNamespace:
        return SimpleNamespace(set=lambda value, tags: values.append((name, value, tags)))

    run_in(monkeypatch, "01000000", "a")
    monkeypatch.setitem(sys.modules, "ray.util.metrics", SimpleNamespace(Gauge=gauge))
    monkeypatch.setattr(run_metrics, "_values", {})
    monkeypatch.setattr(run_metrics, "_ended", ended := threading.Event())
    monkeypatch.setattr(run_metrics, "REPEAT_SECONDS", 0.01)
    for cached in (run_metrics._gauge, run_metrics._start_repeating):
        cached.cache_clear()
    started = MagicMock()
    monkeypatch.setattr(atexit, "register", started)
    yield values
    ended.set()
    if started.called:
        (_, thread), _ = started.call_args
        thread.join(SECONDS)
        assert not thread.is_alive()
    for cached in (run_metrics._gauge, run_metrics._start_repeating):
        cached.cache_clear()


def test_a_value_is_exported_until_the_process_ends(
    exported: list[tuple[str, float, dict[str, str]]],
) -> None:
    """Ray's agent forgets a gauge once it was scraped."""
    run_metrics.publish({(RESTARTS, "1"): 2})
    run_metrics.publish({(VERSION, "run"): 7})
    expected = [(RESTARTS, 2, {"engine": "1"}), (VERSION, 7, {"run": "run"})]
    end = time.monotonic() + SECONDS
    while min(map(exported.count, expected)) < 3 and time.monotonic() < end:
        time.sleep(0.01)
    assert min(map(exported.count, expected)) >= 3


def test_top_reads_the_processes_of_the_newest_run(
    monkeypatch: pytest.MonkeyPatch, records: dict[str, dict[str, Any]]
) -> None:
    """Ray's ids of jobs begin with their lowest byte."""
    for job, worker, value in (("ff000000", "a", 1), ("00010000", "a", 2), ("00010000", "b", 3)):
        run_in(monkeypatch, job, worker)
        run_metrics.publish({(RESTARTS, worker): value})
        run_metrics._values.clear()
    records["metrics/00010000/c"] = {"values": [["of another release", "1", 4]]}
    assert run_metrics.published() == [
        ("ray_rlhf_stack_engine_restarts", {"engine": "a"}, 2),
        ("ray_rlhf_stack_engine_restarts", {"engine": "b"}, 3),
    ]


def test_without_a_run_nothing_is_published() -> None:
    assert run_metrics.published() == []


def test_without_ray_nothing_is_published(
    monkeypatch: pytest.MonkeyPatch, records: dict[str, dict[str, Any]]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    run_metrics.publish({(RESTARTS, "1"): 2})
    assert records == {}
