"""A worker, its engine, and an engine that is killed, each a process."""

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


def tied_and_untied() -> None:
    parent_death.set_parent_death_signal()
    parent_death.clear_parent_death_signal()


def work(begin: Callable[[], None], told: Connection) -> None:
    """A worker that waits for an engine that will not come."""
    begin()
    told.send(os.getpid())
    signal.pause()


def be_killed(begin: Callable[[], None], told: Connection) -> None:
    """An engine."""
    SPAWN.Process(target=work, args=(begin, told)).start()
    signal.pause()


def begin_late(begin: Callable[[], None], told: Connection) -> None:
    """A worker whose engine dies before it has begun."""
    engine = os.getppid()
    told.send(os.getpid())
    until(lambda: os.getppid() != engine, "another parent")
    begin()
    signal.pause()


def be_killed_early(begin: Callable[[], None], told: Connection) -> None:
    """An engine."""
    SPAWN.Process(target=begin_late, args=(begin, told)).start()
    signal.pause()


def orphan(engine: Callable[..., None], begin: Callable[[], None]) -> int:
    """The worker of an engine that was killed, once it has another parent or ended."""
    reading, writing = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=engine, args=(begin, writing))
    process.start()
    assert reading.poll(SECONDS)
    worker = int(reading.recv())
    process.kill()
    process.join()
    until(lambda: status(worker)[1:2] != [str(process.pid)], "the worker to lose its engine")
    return worker


def status(pid: int) -> list[str]:
    """The state of a process and the id of its parent; empty if it has ended."""
    try:
        found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return []
    return [] if found[0] in "ZX" else found


@pytest.mark.parametrize("engine", [be_killed, be_killed_early])
def test_a_worker_that_is_tied_ends_with_its_engine(engine: Callable[..., None]) -> None:
    worker = orphan(engine, parent_death.set_parent_death_signal)
    until(lambda: not status(worker), "the worker to end")


def test_a_worker_that_is_tied_no_more_lives_on() -> None:
    worker = orphan(be_killed, tied_and_untied)
    try:
        assert status(worker)
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_process_that_was_not_spawned_is_left_alone() -> None:
    parent_death.set_parent_death_signal()
    signal_of_death = ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(GET_DEATH_SIGNAL, ctypes.byref(signal_of_death), 0, 0, 0)
    assert signal_of_death.value == 0
