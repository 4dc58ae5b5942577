"""A named shared-memory segment of an engine actor is removed when Ray ends the actor."""

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
    """An actor as upstream's."""

    def create_segment(self) -> tuple[str, list[int]]:
        """Create a segment; return its name and the ids of this process and of its resource tracker."""
        self.segment = SharedMemory(create=True, size=1)
        return self.segment.name, [os.getpid(), resource_tracker._resource_tracker._pid]

    def end(self) -> None:
        ray.actor.exit_actor()


@ray.remote
class Engine(Actor.__ray_actor_class__):
    """An engine actor of this distribution."""

    def __init__(self) -> None:
        startup.begin(None)


@pytest.fixture(scope="module", autouse=True)
def node():
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    yield
    ray.shutdown()


def wait_until(condition) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def segment_of_ended(kind: "type[Actor]") -> Path:
    """Create a segment in an actor of ``kind``; return its file once the actor and its tracker have ended."""
    actor = kind.remote()
    name, processes = ray.get(actor.create_segment.remote(), timeout=SECONDS)
    actor.end.remote()
    wait_until(lambda: not any(Path(f"/proc/{process}").exists() for process in processes))
    return Path("/dev/shm", name)


def test_upstream_tracker_ends_with_its_actor() -> None:
    """The reason for detaching the tracker: the segment stays."""
    segment = segment_of_ended(Actor)
    assert segment.exists()
    segment.unlink()


def test_detached_tracker_removes_the_segment_of_an_ended_engine() -> None:
    segment = segment_of_ended(Engine)
    wait_until(lambda: not segment.exists())
