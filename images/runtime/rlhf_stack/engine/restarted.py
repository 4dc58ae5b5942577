"""The state of an engine process that replaces a lost one: it lacks the trainer's weights.

Ray restarts the actor of an engine on its bundle. The new process has loaded the weights with which the run
began, so it must not answer prompts before its first weight sync.
"""

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_stack.cleanup import process_table, stale_resources, terminate
from rlhf_stack.cluster import gcs_kv, run_metrics
from rlhf_stack.lazy import ray
from rlhf_stack.telemetry import events, run_log

BACKOFF_SECONDS = 5.0  # before the second restart of an engine, twice as long before each further one
LONGEST_BACKOFF = 300.0
POLL_SECONDS = 0.5
_PERMITS, _OUTAGES = "permits", "outages"


@dataclass(frozen=True)
class Restart:
    """Restart ``number`` (from 1) of engine ``engine`` of Ray job ``job``; ``begun`` is a unix time."""

    job: str
    engine: int
    number: int
    begun: float


class NeedsWeightsError(RuntimeError):
    """A restarted engine was asked for an answer before it has the trainer's weights."""


_pending: list[Restart] = []  # the restart of this process, until it has received weights


def begin(job: str, engine: int, sleeps: bool = False) -> None:
    """Record that this process replaces ``engine`` of Ray job ``job``; a repeated restart waits first.

    If the engine ``sleeps`` while the trainer trains on its GPUs, it then waits until `permit` is called: the
    trainer calls it where it would wake the engine up. Ray ends this process if the run ends before.
    """
    restart = Restart(job, engine, 1 + _restarts(job, engine), time.time())
    record = {"engine": engine, "restarts": restart.number}
    gcs_kv.put_record(f"{_key(job)}{engine}", record, gcs_kv.PATIENT_SECONDS)
    _pending.append(restart)
    pause = backoff(restart.number)
    events.emit("engine restart", engine=engine, restarts=restart.number, backoff=pause)
    run_metrics.publish({("rlhf_stack_engine_restarts", str(engine)): restart.number})
    run_log.warning(
        f"engine {engine} was lost: restart {restart.number}" + (f", after {pause:.0f} s" if pause else "")
    )
    time.sleep(pause)
    if sleeps:
        run_log.info(f"engine {engine} starts when the trainer has released the GPUs' memory")
        while not _is_permitted(job, engine, restart.number):
            time.sleep(POLL_SECONDS)


def end_former_processes(variables: Mapping[str, str]) -> None:
    """End what the lost process left on this node, with its GPU memory.

    These are orphaned children of Ray workers that inherited ``variables``.
    """
    orphans = stale_resources.orphaned_workers(process_table.snapshot(), os.getuid())
    left = [one for one in orphans if one.variables and variables.items() <= one.variables.items()]
    if left:
        run_log.warning(f"processes of the lost engine are ended: {', '.join(one.line for one in left)}")
        terminate.terminate_processes(left)


def backoff(number: int) -> float:
    """Return the seconds before restart ``number`` (from 1) of an engine; the first one is immediate."""
    return min(LONGEST_BACKOFF, BACKOFF_SECONDS * 2.0 ** (number - 2)) if number > 1 else 0.0


def counts(job: str) -> dict[int, int]:
    """Return how often each engine of Ray job ``job`` was restarted, by its index."""
    records = gcs_kv.list_records(_key(job), gcs_kv.PATIENT_SECONDS)
    return {int(record["engine"]): int(record["restarts"]) for record in records}


def needs_weights() -> bool:
    """Report whether this process replaces a lost engine and has not received the trainer's weights."""
    return bool(_pending)


def weights_received() -> None:
    """Record that this process has the trainer's weights, and answers prompts again."""
    if not _pending:
        return
    restart = _pending.pop()
    now = time.time()
    # The clocks of two nodes can differ, and a loss is noticed late while nothing calls the engine.
    detected = min(_detected(restart.job, restart.engine) or restart.begun, restart.begun)
    seconds, of_process = now - detected, now - restart.begun
    _record_outage(restart.job, restart.engine, 0.0)
    events.emit(
        "engine restored",
        engine=restart.engine,
        restarts=restart.number,
        seconds=seconds,
        detected=detected,
        process_seconds=of_process,
    )
    run_metrics.publish({("rlhf_stack_engine_restart_seconds", str(restart.engine)): seconds})
    run_log.info(
        f"engine {restart.engine} has the trainer's weights {seconds:.0f} s after its loss was detected, "
        f"{of_process:.0f} s after its process was started again"
    )


def note_loss(engine: int) -> None:
    """Record that the loss of ``engine`` of this job is detected now, unless that of its outage is already.

    An outage ends when the engine has the trainer's weights.
    """
    job = str(ray.get_runtime_context().get_job_id())
    if not _detected(job, engine):
        _record_outage(job, engine, time.time())


def _record_outage(job: str, engine: int, since: float) -> None:
    """Record the unix time ``since`` which ``engine`` is lost, 0 if it is not."""
    gcs_kv.report_record(f"{_OUTAGES}/{job}/{engine}", {"engine": engine, "since": since})


def _detected(job: str, engine: int) -> float:
    """Return the unix time at which the loss of ``engine`` was detected, 0 if it is not lost or unknown."""
    outages: list[dict[str, Any]] = []
    with gcs_kv.best_effort(f"return the outages of engine {engine}"):
        outages = gcs_kv.list_records(f"{_OUTAGES}/{job}/")
    return next((float(one["since"]) for one in outages if one["engine"] == engine), 0.0)


def number() -> int:
    """Return the number of the restart that this process is, 0 if it is the first one of its engine."""
    return _pending[-1].number if _pending else 0


def end_process(reason: str) -> None:
    """End this process at once, so that Ray restarts it."""
    run_log.warning(f"the engine's actor ends to be restarted: {reason}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def count(engine: int) -> int:
    """Return how often ``engine`` of this job was restarted."""
    return _restarts(str(ray.get_runtime_context().get_job_id()), engine)


def permit(engine: int) -> None:
    """Let the restarted ``engine`` of this job start now, if it waits in `begin`."""
    job = str(ray.get_runtime_context().get_job_id())
    if (number := _restarts(job, engine)) and not _is_permitted(job, engine, number):
        record = {"engine": engine, "restarts": number}
        gcs_kv.put_record(f"{_PERMITS}/{job}/{engine}", record, gcs_kv.PATIENT_SECONDS)


def _is_permitted(job: str, engine: int, number: int) -> bool:
    permits = gcs_kv.list_records(f"{_PERMITS}/{job}/", gcs_kv.PATIENT_SECONDS)
    return any(permit["engine"] == engine and permit["restarts"] >= number for permit in permits)


def _restarts(job: str, engine: int) -> int:
    """Return how often ``engine`` was restarted."""
    return counts(job).get(engine, 0)


def _key(job: str) -> str:
    return f"restarts/{job}/"
