"""The locks by which an engine sees the trainer's collectives; real ones are in tests/patches."""

import time
from pathlib import Path

import pytest
from rlhf_stack.accelerator import devices
from rlhf_stack.config import env_vars
from rlhf_stack.engine import gpu_contention

GPU, OTHER = "node/1:0", "node/1:1"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_contention, "lock_directory", lambda: tmp_path / "locks")
    monkeypatch.setattr(gpu_contention, "GRACE_SECONDS", 0.05)
    monkeypatch.setattr(devices, "physical_gpu_id", lambda: GPU)
    monkeypatch.setattr(devices, "is_gpu", lambda: False)
    monkeypatch.setenv(env_vars.CHECK_COTENANCY, "1")


class Work:
    """A collective that ends when it is told to."""

    def __init__(self) -> None:
        self.done = False

    def is_completed(self) -> bool:
        return self.done


class Group:
    """The groups of torch.distributed, as far as they are watched."""

    def barrier(self, work: Work | None) -> Work | None:
        if work is None:
            raise RuntimeError("the network is down")
        return work


def until_landed(gpu: str) -> None:
    end = time.monotonic() + 60
    while gpu_contention.collectives_in_flight(gpu):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_collective_is_in_flight_on_its_gpu_until_it_is_done() -> None:
    tracker = gpu_contention.CollectiveTracker(GPU, "rank 3")
    barrier = gpu_contention._tracked(Group.barrier, "barrier", tracker)
    first, second = Work(), Work()
    assert gpu_contention.collectives_in_flight(GPU) == []
    assert barrier(Group(), first) is first
    barrier(Group(), second)
    assert gpu_contention.collectives_in_flight(GPU) == ["barrier of rank 3"]
    assert gpu_contention.collectives_in_flight(OTHER) == []
    first.done = True
    time.sleep(0.05)
    assert gpu_contention.collectives_in_flight(GPU) == ["barrier of rank 3"], "the second still is"
    second.done = True
    until_landed(GPU)


def test_one_that_fails_is_over() -> None:
    barrier = gpu_contention._tracked(
        Group.barrier, "barrier", gpu_contention.CollectiveTracker(GPU, "rank 3")
    )
    with pytest.raises(RuntimeError, match="the network is down"):
        barrier(Group(), None)
    until_landed(GPU)


def test_an_engine_that_generates_meanwhile_is_an_error_that_names_both() -> None:
    tracker, watch, work = (
        gpu_contention.CollectiveTracker(GPU, "rank 3"),
        gpu_contention.ContentionCheck(),
        Work(),
    )
    watch.check()
    tracker.begin("allreduce")
    tracker.follow(work.is_completed)
    with pytest.raises(
        gpu_contention.GpuContentionError, match=r"generates on GPU node/1:0 .* allreduce of rank 3"
    ):
        watch.check()
    work.done = True
    until_landed(GPU)
    watch.check()


def test_one_that_is_about_to_end_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_contention, "GRACE_SECONDS", 2)
    tracker = gpu_contention.CollectiveTracker(GPU, "rank 3")
    tracker.begin("allreduce")
    end = time.monotonic() + 0.1
    tracker.follow(lambda: time.monotonic() > end)
    gpu_contention.ContentionCheck().check()


def test_nothing_is_looked_at_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.CHECK_COTENANCY, "0")
    tracker = gpu_contention.CollectiveTracker(GPU, "rank 3")
    tracker.begin("allreduce")
    gpu_contention.ContentionCheck().check()
    gpu_contention.track_collectives()
