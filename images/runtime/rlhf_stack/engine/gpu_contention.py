"""Optional check that no trainer collective is in flight on a GPU while an engine generates on it.

A trainer that waits in a barrier keeps its GPU busy, and the engine on the same GPU generates at a quarter of
its speed without any other symptom. With RLHF_STACK_CHECK_COTENANCY=1 each trainer rank locks a file of its
GPU for the duration of a collective, and each engine worker checks the locks of its GPU before each step. A
lock ends with its process.
"""

import atexit
import fcntl
import functools
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_stack.accelerator import devices
from rlhf_stack.config import env_vars
from rlhf_stack.lazy import torch
from rlhf_stack.telemetry import events

GRACE_SECONDS = 0.2  # a collective that ends within it does not slow an engine down
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


class GpuContentionError(RuntimeError):
    """An engine generates while a trainer collective is in flight on its GPU."""


def lock_directory() -> Path:
    """Return the directory of this user's lock files."""
    return Path(tempfile.gettempdir()) / f"rlhf-stack-collectives-{os.getuid()}"


def _make_own(folder: Path) -> None:
    """Create a folder with a predictable name; `RuntimeError` if it is not this user's alone."""
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise RuntimeError(
            f"{folder} belongs to another user or is writable for others, who could stop this run with it: "
            "remove it, or set TMPDIR to a folder of your own"
        )


class CollectiveTracker:
    """Tracks the collectives of this process on its ``gpu``, and holds the lock while one is in flight."""

    def __init__(self, gpu: str, who: str) -> None:
        _make_own(lock_directory())
        self._path = lock_directory() / f"{_name(gpu)}.{os.getpid()}"
        self._file = self._path.open("w", encoding="utf-8")
        self._who = who
        self._changed = threading.Condition()
        self._done: list[Callable[[], bool]] = []
        self._count = 0
        atexit.register(self._path.unlink, missing_ok=True)
        threading.Thread(target=self._poll, name="rlhf_stack collectives", daemon=True).start()

    def begin(self, what: str) -> None:
        """Record the start of a collective."""
        with self._changed:
            self._count += 1
            if self._count == 1:
                fcntl.flock(self._file, fcntl.LOCK_EX)
            self._file.seek(0)
            self._file.truncate()
            self._file.write(f"{what} of {self._who}")
            self._file.flush()

    def follow(self, is_done: Callable[[], bool]) -> None:
        """Treat the collective as in flight until ``is_done``, which a thread polls."""
        with self._changed:
            self._done.append(is_done)
            self._changed.notify()

    def _poll(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._done))
                in_flight = [is_done for is_done in self._done if not is_done()]
                self._count -= len(self._done) - len(in_flight)
                self._done = in_flight
                if not self._count:
                    fcntl.flock(self._file, fcntl.LOCK_UN)
            time.sleep(POLL_SECONDS)


def track_collectives() -> None:
    """Track the collectives of this trainer rank, if the check is on; requires an initialized group.

    All collectives of torch.distributed groups are tracked. Those of a weight sync use other groups.
    """
    if not env_vars.flag(env_vars.CHECK_COTENANCY):
        return
    import torch.distributed as dist

    gpu = devices.physical_gpu_id()
    tracker = CollectiveTracker(
        gpu, f"rank {dist.get_rank()} (process {os.getpid()} on {socket.gethostname()})"
    )
    for name in COLLECTIVES:
        if hasattr(dist.ProcessGroup, name):
            setattr(dist.ProcessGroup, name, _tracked(getattr(dist.ProcessGroup, name), name, tracker))
    events.emit("cotenancy", side="trainer", gpu=gpu)


def _tracked(collective: Callable[..., Any], name: str, tracker: CollectiveTracker) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(*arguments: Any, **options: Any) -> Any:
        tracker.begin(name.strip("_"))
        is_done: Callable[[], bool] = _always
        try:
            work = collective(*arguments, **options)
            is_done = _until_done(work)
        finally:
            tracker.follow(is_done)
        return work

    return call


def _always() -> bool:
    return True


def _until_done(work: Any) -> Callable[[], bool]:
    """Return a function that reports whether ``work`` is done; NCCL returns None for work on the stream."""
    if work is not None:
        done: Callable[[], bool] = work.is_completed
        return done
    if not devices.is_gpu():
        return _always
    event = torch.cuda.Event()
    event.record()
    query: Callable[[], bool] = event.query
    return query


class ContentionCheck:
    """The check of an engine worker's GPU; call `check` before each step."""

    def __init__(self) -> None:
        self._gpu = devices.physical_gpu_id() if env_vars.flag(env_vars.CHECK_COTENANCY) else None
        if self._gpu is not None:
            events.emit("cotenancy", side="engine", gpu=self._gpu)

    def check(self) -> None:
        """Raise `GpuContentionError` if a collective stays in flight on this GPU for a grace time."""
        if self._gpu is None or not collectives_in_flight(self._gpu):
            return
        time.sleep(GRACE_SECONDS)
        if found := collectives_in_flight(self._gpu):
            text = (
                f"an engine generates on GPU {self._gpu} of {socket.gethostname()} while the trainer waits "
                f"there in a collective, which slows the engine down several times: {'; '.join(found)}. "
                f"No rank may wait for others while engines generate ({env_vars.CHECK_COTENANCY})"
            )
            events.emit("cotenancy violated", gpu=self._gpu, collectives=found)
            raise GpuContentionError(text)


def collectives_in_flight(gpu: str) -> list[str]:
    """Describe the collectives that are in flight on ``gpu``."""
    found = []
    for path in sorted(lock_directory().glob(f"{_name(gpu)}.*")):
        try:
            with path.open(encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            found.append(path.read_text(encoding="utf-8"))
        except FileNotFoundError:  # its process has ended
            continue
    return found


def _name(gpu: str) -> str:
    """Return ``gpu`` in a form that can be part of a file name."""
    return gpu.replace("/", "_").replace(":", "_")
