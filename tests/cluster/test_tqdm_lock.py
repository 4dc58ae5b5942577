"""An engine process has no named tqdm lock in /dev/shm while it loads a model, which a kill would leave.

The process is spawned, as by vLLM: the lock of a forked process has no name.
"""

import multiprocessing
from pathlib import Path

from rlhf_stack.engine.startup import InstrumentedStartup
from tqdm import tqdm

SHARED_MEMORY = Path("/dev/shm")


class Loader:
    """A replacement of vLLM's worker that shows a progress bar while it loads."""

    rank = 0

    def load_model(self) -> list[str]:
        with tqdm(total=1):
            return lock_names()


class InstrumentedLoader(InstrumentedStartup, Loader):
    """The loader as the engine uses it."""


def lock_names() -> list[str]:
    return sorted(path.name for path in SHARED_MEMORY.glob("sem.*"))


def load(loader: type[Loader], names: "multiprocessing.Queue[list[str]]") -> None:
    names.put(loader().load_model())


def locks_created_by(loader: type[Loader]) -> set[str]:
    """Return the named locks that appear while a separate process loads with ``loader``."""
    context = multiprocessing.get_context("spawn")
    names = context.Queue()
    process = context.Process(target=load, args=(loader, names))
    before = {*lock_names()}
    process.start()
    during = {*names.get(timeout=60)}
    process.join()
    return during - before


def test_tqdm_lock_has_no_name() -> None:
    assert locks_created_by(Loader)
    assert not locks_created_by(InstrumentedLoader)
