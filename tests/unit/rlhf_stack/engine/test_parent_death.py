"""A worker dies with its killed engine; worker and engine are real processes."""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from rlhf_stack.engine import parent_death

from tests.network.waiting import until

SPAWN = multiprocessing.get_context("spawn")
SECONDS = 60
GET_DEATH_SIGNAL = 2  # PR_GET_PDEATHSIG


def set_and_clear() -> None:
    parent_death.set_parent_death_signal()
    parent_death.clear_parent_death_signal()


def work(begin: Callable[[], None], ready: Connection) -> None:
    """Run as a worker that waits for its engine for ever."""
    begin()
    ready.send(os.getpid())
    signal.pause()


def begin_late(begin: Callable[[], None], ready: Connection) -> None:
    """Run as a worker whose engine dies before it starts."""
    engine = os.getppid()
    ready.send(os.getpid())
    until(lambda: os.getppid() != engine, "another parent")
    begin()
    signal.pause()


def be_killed(worker: Callable[..., None], begin: Callable[[], None], ready: Connection) -> None:
    """Run as an engine."""
    SPAWN.Process(target=worker, args=(begin, ready)).start()
    signal.pause()


def orphan(run: Callable[..., None], begin: Callable[[], None]) -> int:
    """Return the worker of a killed engine, once it has another parent or has ended."""
    reading, writing = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=be_killed, args=(run, begin, writing))
    process.start()
    assert reading.poll(SECONDS)
    worker = int(reading.recv())
    process.kill()
    process.join()
    until(lambda: status(worker)[1:2] != [str(process.pid)], "the worker to lose its engine")
    return worker


def status(pid: int) -> list[str]:
    """Return the state of a process and its parent's id; empty if it has ended."""
    try:
        found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return []
    return [] if found[0] in "ZX" else found


@pytest.mark.parametrize("run", [work, begin_late])
def test_worker_dies_with_its_engine(run: Callable[..., None]) -> None:
    worker = orphan(run, parent_death.set_parent_death_signal)
    until(lambda: not status(worker), "the worker to end")


def test_worker_survives_after_clearing_the_signal() -> None:
    worker = orphan(work, set_and_clear)
    try:
        assert status(worker)
    finally:
        os.kill(worker, signal.SIGKILL)


def test_unspawned_process_is_not_affected() -> None:
    parent_death.set_parent_death_signal()
    signal_of_death = ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(GET_DEATH_SIGNAL, ctypes.byref(signal_of_death), 0, 0, 0)
    assert signal_of_death.value == 0
