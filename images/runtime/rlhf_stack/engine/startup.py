"""Startup of engines: each process reports its steps, and the wait for all engines has a deadline.

The processes of an engine are an actor, its child, and workers that are actors or children. Each stores a
record of its last step in the GCS.
"""

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rlhf_stack.cluster import actor_registry, answer_once, gcs_kv
from rlhf_stack.compat import resource_tracker
from rlhf_stack.compat.byte_level_tokenizers import keep_byte_level_tokenizers
from rlhf_stack.config import env_vars
from rlhf_stack.engine import recipes, restarted
from rlhf_stack.lazy import ray
from rlhf_stack.telemetry import events, run_log

WORKER_CLASS = "rlhf_stack.engine.worker.InstrumentedWorker"
POLL_SECONDS = 2.0
TRANSFER_BACKEND = "rlhf_stack"  # of vLLM's weight-transfer interface
EXIT_CODES = re.compile(r"Failed core proc\(s\): \{(.*)\}")
ENGINE = "RLHF_STACK_ENGINE"  # "job/index", set for the processes of an engine, never by users


class StartError(RuntimeError):
    """An engine did not start in time; the message has the last step of each of its ranks."""


def begin(index: int | None) -> str | None:
    """Register this actor as engine ``index``; return the key with which other processes `join` it.

    Child processes inherit the key. Shared memory of the actor and its children is removed when all of them
    have ended, even if Ray kills them.
    """
    resource_tracker.detach()
    if index is None:
        return None
    context = ray.get_runtime_context()
    key = f"{context.get_job_id()}/{index}"
    join(key)
    actor_registry.register_actor(f"engine {index}")
    recipe = recipes.load(index)
    if context.was_current_actor_reconstructed or (recipe and recipe["moved"]):  # or it replaces another one
        restarted.end_former_processes({ENGINE: key})
        if context.was_current_actor_reconstructed:
            recipes.note_lost_process(index)
        restarted.begin(str(context.get_job_id()), index, bool(recipe and recipe["sleeps"]))
    report_step("actor started", None, 0.0)
    return key


def join(engine: str | None) -> None:
    """Join the engine for which `begin` returned ``engine``, in a worker that Ray started."""
    if engine is not None:
        os.environ[ENGINE] = engine


@contextmanager
def step(name: str, rank: int | None = None) -> Iterator[None]:
    """Report the beginning and the end of a startup step of an engine's process or worker ``rank``."""
    report_step(f"{name} ...", rank, 0.0)
    start = time.monotonic()
    yield
    report_step(name, rank, time.monotonic() - start)


async def start_engine(engine_class: Any, arguments: Any) -> Any:
    """Return vLLM's asynchronous engine, which loads tokenizers as the trainer, once it responds; reported.

    If vLLM's process was killed and this engine can be restarted, this process ends, so that Ray restarts it.
    """
    keep_byte_level_tokenizers()
    try:
        with step("engine up"):
            engine = engine_class.from_engine_args(arguments)
            await engine.is_sleeping()
    except RuntimeError as error:
        if restarted.number() < _restarts_after(str(error)):
            restarted.end_process(str(error))
        raise
    return engine


def _restarts_after(error: str) -> int:
    """Return how many restarts an engine may have when vLLM's process has ended with ``error``.

    A negative exit code is a signal. Without a code, which vLLM may not know yet, it is restarted once, and
    after an error of its own never.
    """
    allowed, codes = env_vars.engine_restarts(), EXIT_CODES.search(error)
    if codes and not codes[1]:
        return min(1, allowed)
    return allowed if codes and ": -" in codes[1] else 0


def startup_arguments(index: int) -> dict[str, Any]:
    """Return the arguments with which the processes of engine ``index`` use `InstrumentedWorker`."""
    transfer = {"backend": TRANSFER_BACKEND}
    return {"engine_index": index, "worker_cls": WORKER_CLASS, "weight_transfer_config": transfer}


def report_step(name: str, rank: int | None, seconds: float) -> None:
    """Report that a step begins (its name ends in "...") or is done after ``seconds``."""
    if ENGINE not in os.environ:
        return
    job, index = os.environ[ENGINE].split("/")
    who = f"engine {index}" if rank is None else f"engine {index} rank {rank}"
    host = socket.gethostname()
    record = {"engine": int(index), "who": who, "rank": rank, "step": name, "host": host, "time": time.time()}
    events.emit("engine start", engine=int(index), rank=rank, step=name, seconds=seconds)
    run_log.info(f"{who} on {host}: {name}" + (f" after {seconds:.1f} s" if seconds else ""))
    gcs_kv.report_record(f"{job}/{who}", record)


class InstrumentedStartup:
    """A base listed before vLLM's worker class, which reports the first steps of a worker's startup."""

    rank: int

    def init_device(self) -> Any:
        """Initialize the device and the rendezvous with the other ranks."""
        with step("device and rendezvous", self.rank):
            return super().init_device()  # type: ignore[misc]

    def load_model(self, *arguments: Any, **options: Any) -> Any:
        """Load the weights."""
        _use_process_local_tqdm_lock()
        with step("model loaded", self.rank):
            return super().load_model(*arguments, **options)  # type: ignore[misc]


def _use_process_local_tqdm_lock() -> None:
    """Replace tqdm's lock, a file in /dev/shm that an engine leaves when it is killed."""
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())


def wait_for_engine_startup(
    engines: list[Any] | None,
    others: Sequence[Any] = (),
    check: Callable[[Sequence[int]], Mapping[int, Any | None]] | None = None,
) -> None:
    """Wait until every engine is up and ``others`` (references) are done; raise the first error at once.

    Raises `StartError` if an engine is slow and not up in time. A dead engine raises Ray's error. ``check``
    is called with the indices of the missing engines, which may be none, from time to time; it returns the
    actors of those that start again, some of which replace others in ``engines``. One that is None is not
    awaited any more. The time starts again with each.
    """
    engines = [] if engines is None else engines
    starts = {answer_once.started(engine): index for index, engine in enumerate(engines)}
    pending = [*starts, *others]
    end = time.monotonic() + env_vars.engine_timeout()
    while pending:
        missing = [starts[reference] for reference in pending if reference in starts]
        ready, pending = ray.wait(pending, num_returns=1, timeout=POLL_SECONDS if missing or check else None)
        ray.get(ready)
        if not ready:
            for index, engine in (check(missing) if check else {}).items():
                pending = [reference for reference in pending if starts.get(reference) != index]
                end = time.monotonic() + env_vars.engine_timeout()
                if engine is None:
                    continue
                engines[index] = engine
                pending.append(answer_once.started(engine))
                starts[pending[-1]] = index
            missing = [starts[reference] for reference in pending if reference in starts]
            if missing and time.monotonic() > end:
                raise late(missing)


def late(engines: Sequence[int]) -> StartError:
    """Return the error for ``engines`` that are not up in time, with the last step of each of their ranks."""
    return StartError(
        f"engines {list(engines)} are not up after {env_vars.engine_timeout():g} s "
        f"({env_vars.ENGINE_TIMEOUT}):\n  " + "\n  ".join(_last_steps(engines))
    )


def _last_steps(engines: Sequence[int]) -> list[str]:
    """Describe the last reported step of each process of ``engines``."""
    try:
        records = gcs_kv.list_records(f"{ray.get_runtime_context().get_job_id()}/")
    except Exception as error:  # of any type: it must not take the place of the error that this is for
        return [f"their last steps are unknown, because Ray's head does not report them: {error}"]
    return describe_steps(records, engines, time.time())


def describe_steps(records: Sequence[dict[str, Any]], engines: Sequence[int], now: float) -> list[str]:
    """Return a line for each process of ``engines`` in ``records``, or for an engine without records."""
    lines = []
    for index in engines:
        lines += [
            f"{record['who']} on {record['host']}: {record['step']}, {now - record['time']:.0f} s ago"
            for record in records
            if record["engine"] == index
        ] or [f"engine {index}: its actor has not started"]
    return lines
