"""How far the start of each engine is, told step by step by its processes, and a wait for it that ends.

The processes of an engine are an actor, a child of it, and workers that are actors or children again. Each
leaves a record of its step.
"""

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rlhf_stack.cluster import actor_registry, gcs_kv
from rlhf_stack.compat import resource_tracker
from rlhf_stack.config import env_vars
from rlhf_stack.telemetry import events
from rlhf_stack.telemetry.logging import tell

ENGINE = "RLHF_STACK_ENGINE"  # "job/index", set for the processes of an engine, never by users


class StartError(RuntimeError):
    """An engine that is not up in time; the text has the step of each of its ranks."""


def begin(index: int | None) -> str | None:
    """The actor of engine ``index`` starts: its children inherit whose they are; what others `join` by.

    What they name in /dev/shm is removed when all of them have died, also if Ray ends them.
    """
    resource_tracker.detach()
    if index is None:
        return None
    import ray

    own = f"{ray.get_runtime_context().get_job_id()}/{index}"
    join(own)
    actor_registry.introduce(f"engine {index}")
    report("actor started", None, 0.0)
    return own


def join(engine: str | None) -> None:
    """This process is one of the engine for which `begin` returned ``engine``: a worker that Ray started."""
    if engine is not None:
        os.environ[ENGINE] = engine


@contextmanager
def step(name: str, rank: int | None = None) -> Iterator[None]:
    """Around one step of the start, in a process of an engine; ``rank`` is that of a worker in its engine."""
    report(f"{name} ...", rank, 0.0)
    start = time.monotonic()
    yield
    report(name, rank, time.monotonic() - start)


def report(name: str, rank: int | None, seconds: float) -> None:
    """Tell that a step begins (its name ends in "...") or is done after ``seconds``."""
    if ENGINE not in os.environ:
        return
    job, index = os.environ[ENGINE].split("/")
    who = f"engine {index}" if rank is None else f"engine {index} rank {rank}"
    here = {"host": socket.gethostname(), "time": time.time()}
    told = {"engine": int(index), "who": who, "rank": rank, "step": name, **here}
    events.emit("engine start", engine=int(index), rank=rank, step=name, seconds=seconds)
    tell(f"{who} on {told['host']}: {name}" + (f" after {seconds:.1f} s" if seconds else ""))
    gcs_kv.put(f"{job}/{who}", told)


class ToldStart:
    """A base that stands before vLLM's own worker class: the first steps of a worker's start are told."""

    rank: int

    def init_device(self) -> Any:
        """The device, and the rendezvous with the other ranks."""
        with step("device and rendezvous", self.rank):
            return super().init_device()  # type: ignore[misc]

    def load_model(self, *arguments: Any, **options: Any) -> Any:
        """The weights."""
        _draw_bars_alone()
        with step("model loaded", self.rank):
            return super().load_model(*arguments, **options)  # type: ignore[misc]


def _draw_bars_alone() -> None:
    """Give tqdm a lock of this process: its own is a file in /dev/shm, left by an engine that is killed."""
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())


def wait(engines: Sequence[Any] | None, others: Sequence[Any] = ()) -> None:
    """Until ``others`` (references) are done and every engine is up; the first error is raised at once.

    `StartError` when an engine is not up in time: an engine that is slow, and not one that died.
    """
    import ray

    starts = {engine.__ray_ready__.remote(): index for index, engine in enumerate(engines or [])}
    pending = [*starts, *others]
    end = time.monotonic() + env_vars.engine_timeout()
    while pending:
        missing = [starts[reference] for reference in pending if reference in starts]
        left = max(0.0, end - time.monotonic()) if missing else None
        ready, pending = ray.wait(pending, num_returns=1, timeout=left)
        ray.get(ready)
        if not ready:
            raise StartError(
                f"engines {missing} are not up after {env_vars.engine_timeout():g} s "
                f"({env_vars.ENGINE_TIMEOUT}):\n  " + "\n  ".join(_steps(missing))
            )


def _steps(engines: Sequence[int]) -> list[str]:
    """The last step of each process of ``engines`` that has told one."""
    import ray

    told = gcs_kv.under(f"{ray.get_runtime_context().get_job_id()}/")
    return describe(told, engines, time.time())


def describe(told: Sequence[dict[str, Any]], engines: Sequence[int], now: float) -> list[str]:
    """A line for each process of ``engines`` in ``told``, or for the engine if none has told a step."""
    lines = []
    for index in engines:
        own = [value for value in told if value["engine"] == index]
        lines += [
            f"{value['who']} on {value['host']}: {value['step']}, {now - value['time']:.0f} s ago"
            for value in own
        ] or [f"engine {index}: its actor has not started"]
    return lines
