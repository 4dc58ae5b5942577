"""A segment of shared memory that an actor has named is removed when Ray ends the actor."""

import os
import time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
import ray
from rlhf_stack.engine import startup

SECONDS = 60


@ray.remote
class Actor:
    """As upstream's."""

    def name(self) -> tuple[str, list[int]]:
        """A new segment, and who knows of it: this process and, unless it is detached, its tracker."""
        self.segment = SharedMemory(create=True, size=1)
        return self.segment.name, [os.getpid(), resource_tracker._resource_tracker._pid]

    def end(self) -> None:
        ray.actor.exit_actor()


@ray.remote
class Engine(Actor.__ray_actor_class__):
    """As ours."""

    def __init__(self) -> None:
        startup.begin(None)


@pytest.fixture(scope="module", autouse=True)
def node():
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    yield
    ray.shutdown()


def until(holds) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def segment_of_a_dead(kind: "type[Actor]") -> Path:
    """What an actor named that has ended, and its tracker with it unless that is on its own."""
    actor = kind.remote()
    name, processes = ray.get(actor.name.remote(), timeout=SECONDS)
    actor.end.remote()
    until(lambda: not any(Path(f"/proc/{process}").exists() for process in processes))
    return Path("/dev/shm", name)


def test_ray_ends_the_tracker_of_an_actor_with_it() -> None:
    """What ours is for."""
    segment = segment_of_a_dead(Actor)
    assert segment.exists()
    segment.unlink()


def test_the_tracker_of_an_engine_is_left_and_removes_what_it_named() -> None:
    segment = segment_of_a_dead(Engine)
    until(lambda: not segment.exists())
