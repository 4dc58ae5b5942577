"""What an engine's own process leaves in /dev/shm while it loads a model: nothing that a kill could leave.

It is spawned, as vLLM spawns it, since a lock of a process that was forked has no name.
"""

import multiprocessing
from pathlib import Path

from rlhf_stack.engine.startup import ToldStart
from tqdm import tqdm

SHARED_MEMORY = Path("/dev/shm")


class Loader:
    """In place of vLLM's worker: it draws a bar as it loads."""

    rank = 0

    def load_model(self) -> list[str]:
        with tqdm(total=1):
            return names()


class ToldLoader(ToldStart, Loader):
    """As the engine has it."""


def names() -> list[str]:
    return sorted(path.name for path in SHARED_MEMORY.glob("sem.*"))


def load(loader: type[Loader], found: "multiprocessing.Queue[list[str]]") -> None:
    found.put(loader().load_model())


def seen_by(loader: type[Loader]) -> set[str]:
    """The named locks that are new while a process of its own loads by ``loader``."""
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    process = context.Process(target=load, args=(loader, found))
    before = {*names()}
    process.start()
    during = {*found.get(timeout=60)}
    process.join()
    return during - before


def test_a_bar_has_a_lock_without_a_name() -> None:
    assert seen_by(Loader)
    assert not seen_by(ToldLoader)
