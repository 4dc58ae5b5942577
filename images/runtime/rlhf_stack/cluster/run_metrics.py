"""The metrics of a run: gauges that Ray exports for Prometheus, and records for ``rlhf-stack top``.

Each has the prefix ``ray_`` there. Ray's node agent (2.55) forgets a gauge once it was scraped, so that a
value that is set once per sync would be in one scrape alone: a thread sets the last values again. ``top``
reads records in the GCS and takes no sample from Prometheus.
"""

import atexit
import threading
from collections.abc import Mapping
from functools import cache
from typing import Any

from rlhf_stack.cluster import gcs_kv
from rlhf_stack.lazy import ray

REPEAT_SECONDS = 5.0  # below Prometheus' usual interval
SYNC_METRICS = {
    "rlhf_stack_sync_seconds": ("Seconds of the last weight sync.", "backend"),
    "rlhf_stack_sync_bytes": ("Bytes of the trainer's weights in the last sync.", "backend"),
    "rlhf_stack_sync_sent_bytes": ("Bytes sent for them: fewer if only changed elements are.", "backend"),
    "rlhf_stack_sync_gigabytes_per_second": ("Bytes by seconds of the last weight sync, in GB/s.", "backend"),
    "rlhf_stack_mixed_answers": ("Answers with weights of two versions since the sync before.", "backend"),
    "rlhf_stack_engine_tokens_per_second": ("Tokens/s of an engine since the sync before.", "engine"),
}
RESTART_METRICS = {
    "rlhf_stack_engine_restarts": ("How often an engine was restarted.", "engine"),
    "rlhf_stack_engine_restart_seconds": ("Seconds from an engine's last loss to its weights.", "engine"),
}
RUN_METRICS = {
    "rlhf_stack_recovery_seconds": ("Seconds in which the run has waited for lost engines.", "run"),
    "rlhf_stack_weight_version": ("Version of the weights that all engines have.", "run"),
}
METRICS = {**SYNC_METRICS, **RESTART_METRICS, **RUN_METRICS}
RECORDS = "metrics/"

_values: dict[tuple[str, str], float] = {}
_lock = threading.Lock()
_ended = threading.Event()


def publish(values: Mapping[tuple[str, str], float]) -> None:
    """Export ``values`` until this process ends, by the name of one of `METRICS` and the value of its tag.

    Without a connection to Ray this does nothing.
    """
    if not ray.is_initialized():
        return
    with _lock:
        _values.update(values)
        now = dict(_values)
    _export(values)
    _start_repeating()
    context = ray.get_runtime_context()
    record = [[name, tag, value] for (name, tag), value in sorted(now.items())]
    gcs_kv.report_record(f"{RECORDS}{context.get_job_id()}/{context.get_worker_id()}", {"values": record})


def published() -> list[tuple[str, dict[str, str], float]]:
    """Return the values of all processes of the newest run, each with its Prometheus name and its tags."""
    jobs = {key.removeprefix(RECORDS).partition("/")[0] for key in gcs_kv.list_keys(RECORDS)}
    if not jobs:
        return []
    newest = max(jobs, key=lambda job: int.from_bytes(bytes.fromhex(job), "little"))
    return [
        (f"ray_{name}", {METRICS[name][1]: tag}, value)
        for record in gcs_kv.list_records(f"{RECORDS}{newest}/")
        for name, tag, value in record["values"]
        if name in METRICS  # the process may have another release
    ]


def _export(values: Mapping[tuple[str, str], float]) -> None:
    for (name, tag), value in values.items():
        _gauge(name).set(value, tags={METRICS[name][1]: tag})


@cache
def _gauge(name: str) -> Any:
    from ray.util.metrics import Gauge

    text, tag = METRICS[name]
    return Gauge(name, description=text, tag_keys=(tag,))


@cache
def _start_repeating() -> None:
    thread = threading.Thread(target=_repeat, name="rlhf-stack-metrics", daemon=True)
    thread.start()
    atexit.register(_end, thread)


def _repeat() -> None:
    while not _ended.wait(REPEAT_SECONDS) and ray.is_initialized():
        with _lock:
            now = dict(_values)
        _export(now)


def _end(thread: threading.Thread) -> None:
    """Let the thread end before the interpreter does, in which it would call Ray."""
    _ended.set()
    thread.join(REPEAT_SECONDS)
