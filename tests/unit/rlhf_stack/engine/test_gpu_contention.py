"""Locks by which an engine detects trainer collectives; tests/patches has real collectives."""

import os
import time
from pathlib import Path

import pytest
from rlhf_stack.accelerator import devices
from rlhf_stack.config import env_vars
from rlhf_stack.engine import gpu_contention

from tests.unit.fake_cuda import Gpu

GPU, OTHER = "node/1:0", "node/1:1"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_contention, "lock_directory", lambda: tmp_path / "locks")
    monkeypatch.setattr(gpu_contention, "GRACE_SECONDS", 0.05)
    monkeypatch.setattr(devices, "physical_gpu_id", lambda: GPU)
    monkeypatch.setattr(devices, "is_gpu", lambda: False)
    monkeypatch.setenv(env_vars.CHECK_COTENANCY, "1")


class Work:
    """A collective that ends when a test sets ``done``."""

    def __init__(self) -> None:
        self.done = False

    def is_completed(self) -> bool:
        return self.done


class Group:
    """The tracked part of a torch.distributed group."""

    def barrier(self, work: Work | None) -> Work | None:
        if work is None:
            raise RuntimeError("the network is down")
        return work


def wait_until_idle(gpu: str) -> None:
    end = time.monotonic() + 60
    while gpu_contention.collectives_in_flight(gpu):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_collective_is_in_flight_until_it_is_done() -> None:
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
    assert gpu_contention.collectives_in_flight(GPU) == ["barrier of rank 3"], "the second is still in flight"
    second.done = True
    wait_until_idle(GPU)


def test_a_collective_of_the_gpus_stream_is_in_flight_until_the_gpu_has_run_it(
    cuda: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL returns nothing for it."""
    monkeypatch.setattr(devices, "is_gpu", lambda: True)
    ended: list[int] = []
    cuda.process.current.add(lambda: bool(ended))
    is_done = gpu_contention._until_done(None)
    assert not is_done()
    ended.append(1)
    assert [is_done(), is_done()] == [False, True]  # a query lets the GPU run one operation


def test_failed_collective_is_not_in_flight() -> None:
    barrier = gpu_contention._tracked(
        Group.barrier, "barrier", gpu_contention.CollectiveTracker(GPU, "rank 3")
    )
    with pytest.raises(RuntimeError, match="the network is down"):
        barrier(Group(), None)
    wait_until_idle(GPU)


def test_generating_during_a_collective_is_an_error_that_names_both() -> None:
    tracker, check, work = (
        gpu_contention.CollectiveTracker(GPU, "rank 3"),
        gpu_contention.ContentionCheck(),
        Work(),
    )
    check.check()
    tracker.begin("allreduce")
    tracker.follow(work.is_completed)
    with pytest.raises(
        gpu_contention.GpuContentionError, match=r"generates on GPU node/1:0 .* allreduce of rank 3"
    ):
        check.check()
    work.done = True
    wait_until_idle(GPU)
    check.check()


def test_collective_that_ends_within_the_grace_time_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_contention, "GRACE_SECONDS", 2)
    tracker = gpu_contention.CollectiveTracker(GPU, "rank 3")
    tracker.begin("allreduce")
    end = time.monotonic() + 0.1
    tracker.follow(lambda: time.monotonic() > end)
    gpu_contention.ContentionCheck().check()


def test_check_is_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.CHECK_COTENANCY, "0")
    tracker = gpu_contention.CollectiveTracker(GPU, "rank 3")
    tracker.begin("allreduce")
    gpu_contention.ContentionCheck().check()
    gpu_contention.track_collectives()


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is predictable, and it is in /tmp."""
    folder = tmp_path / "locks"
    folder.symlink_to(tmp_path)
    with pytest.raises(RuntimeError, match="belongs to another user or is writable"):
        gpu_contention.CollectiveTracker("GPU-0", "rank 0")
    folder.unlink()
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(RuntimeError, match="set TMPDIR"):
        gpu_contention.CollectiveTracker("GPU-0", "rank 0")
    folder.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(RuntimeError, match="belongs to another user"):
        gpu_contention.CollectiveTracker("GPU-0", "rank 0")
