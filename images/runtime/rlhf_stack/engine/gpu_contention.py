"""A check, on request, that no collective of the trainer is in flight on a GPU on which an engine generates.

A trainer that waits in a barrier keeps its GPU busy, and the engine on the same GPU generates at a quarter
of its speed; nothing else tells of it. With RLHF_STACK_CHECK_COTENANCY=1 each rank of the trainer holds a
lock on a file of its GPU from the start of a collective to its end, and each worker of an engine looks at the
locks of its GPU before each step. A lock ends with its process.
"""

import atexit
import fcntl
import functools
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_stack.accelerator import devices
from rlhf_stack.config import env_vars
from rlhf_stack.telemetry import events

GRACE_SECONDS = 0.2  # a collective that is about to end is none that slows an engine down
POLL_SECONDS = 0.005
COLLECTIVES = (
    "allgather",
    "_allgather_base",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)


class CotenancyError(RuntimeError):
    """An engine generates while a collective of the trainer is in flight on its GPU."""


def folder() -> Path:
    """Where the locks of this machine's users are, one folder each."""
    return Path(tempfile.gettempdir()) / f"rlhf-stack-collectives-{os.getuid()}"


class Flights:
    """The collectives of this process that are in flight on its ``gpu``."""

    def __init__(self, gpu: str, who: str) -> None:
        folder().mkdir(mode=0o700, exist_ok=True)
        self._path = folder() / f"{_name(gpu)}.{os.getpid()}"
        self._file = self._path.open("w", encoding="utf-8")
        self._who = who
        self._changed = threading.Condition()
        self._done: list[Callable[[], bool]] = []
        self._count = 0
        atexit.register(self._path.unlink, missing_ok=True)
        threading.Thread(target=self._land, name="rlhf_stack collectives", daemon=True).start()

    def begin(self, what: str) -> None:
        """A collective starts."""
        with self._changed:
            self._count += 1
            if self._count == 1:
                fcntl.flock(self._file, fcntl.LOCK_EX)
            self._file.seek(0)
            self._file.truncate()
            self._file.write(f"{what} of {self._who}")
            self._file.flush()

    def follow(self, is_done: Callable[[], bool]) -> None:
        """It lasts until ``is_done``, which a thread of this process asks."""
        with self._changed:
            self._done.append(is_done)
            self._changed.notify()

    def _land(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._done))
                flying = [is_done for is_done in self._done if not is_done()]
                self._count -= len(self._done) - len(flying)
                self._done = flying
                if not self._count:
                    fcntl.flock(self._file, fcntl.LOCK_UN)
            time.sleep(POLL_SECONDS)


def watch() -> None:
    """Watch the collectives of this rank of the trainer, if that is asked for; its group is made already.

    All that go by the groups of torch.distributed are seen; those of a weight sync are of another kind.
    """
    if not env_vars.flag(env_vars.CHECK_COTENANCY):
        return
    import torch.distributed as dist

    gpu = devices.physical_gpu_id()
    flights = Flights(gpu, f"rank {dist.get_rank()} (process {os.getpid()} on {socket.gethostname()})")
    for name in COLLECTIVES:
        if hasattr(dist.ProcessGroup, name):
            setattr(dist.ProcessGroup, name, _watched(getattr(dist.ProcessGroup, name), name, flights))
    events.emit("cotenancy", side="trainer", gpu=gpu)


def _watched(collective: Callable[..., Any], name: str, flights: Flights) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(*arguments: Any, **options: Any) -> Any:
        flights.begin(name.strip("_"))
        is_done: Callable[[], bool] = _always
        try:
            work = collective(*arguments, **options)
            is_done = _until_done(work)
        finally:
            flights.follow(is_done)
        return work

    return call


def _always() -> bool:
    return True


def _until_done(work: Any) -> Callable[[], bool]:
    """Whether ``work`` is done; NCCL returns none for what is only ordered on the stream."""
    if work is not None:
        done: Callable[[], bool] = work.is_completed
        return done
    if not devices.is_gpu():
        return _always
    import torch

    event = torch.cuda.Event()
    event.record()
    found: Callable[[], bool] = event.query
    return found


class Watch:
    """The look of an engine's worker at its GPU: `check` before each step."""

    def __init__(self) -> None:
        self._gpu = devices.physical_gpu_id() if env_vars.flag(env_vars.CHECK_COTENANCY) else None
        if self._gpu is not None:
            events.emit("cotenancy", side="engine", gpu=self._gpu)

    def check(self) -> None:
        """`CotenancyError` if a collective is in flight on this GPU and still is after a moment."""
        if self._gpu is None or not in_flight(self._gpu):
            return
        time.sleep(GRACE_SECONDS)
        if found := in_flight(self._gpu):
            text = (
                f"an engine generates on GPU {self._gpu} of {socket.gethostname()} while the trainer waits "
                f"there in a collective, which slows the engine down several times: {'; '.join(found)}. "
                f"Let no rank wait for others while engines generate ({env_vars.CHECK_COTENANCY})"
            )
            events.emit("cotenancy violated", gpu=self._gpu, collectives=found)
            raise CotenancyError(text)


def in_flight(gpu: str) -> list[str]:
    """The collectives that are in flight on ``gpu``, in words."""
    found = []
    for path in sorted(folder().glob(f"{_name(gpu)}.*")):
        try:
            with path.open(encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            found.append(path.read_text(encoding="utf-8"))
        except FileNotFoundError:  # its process has ended meanwhile
            continue
    return found


def _name(gpu: str) -> str:
    """``gpu`` as part of a file's name."""
    return gpu.replace("/", "_").replace(":", "_")
