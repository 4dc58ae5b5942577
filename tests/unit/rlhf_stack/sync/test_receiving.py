"""An engine worker's side of a sync whose source is lost; syncs between processes are in tests/cluster."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from rlhf_stack.cluster.actor_registry import PeerError
from rlhf_stack.config import env_vars
from rlhf_stack.sync import receiving
from rlhf_stack.sync.background import Background
from rlhf_stack.sync.errors import SyncError
from rlhf_stack.sync.group import Watch
from rlhf_stack.sync.membership import Members, ended

from tests.unit.fake_cuda import ANY_ORDER, SECONDS, Gpu


class Group:
    """A sync group that keeps the error with which its sync ends; its source may be lost before it begins."""

    def __init__(self, lost: str = "") -> None:
        self.lost = lost
        self.error: BaseException | None = None

    @contextmanager
    def syncing(self, _: Watch) -> Iterator[None]:
        if self.lost:
            raise SyncError(self.lost)
        try:
            yield
        except BaseException as error:
            self.error = error
            raise


def test_a_source_that_is_lost_between_syncs_ends_the_sync_of_all_others() -> None:
    """Each publishes the error with which its sync ends: the other sources learn the cause from it."""
    groups: list[Any] = [Group(), Group("rank 0 on 10.0.0.2 does not answer"), Group(), Group("as lost")]
    with pytest.raises(SyncError, match="rank 0 on 10") as ended:
        receiving.receive(groups, [], 1, "cpu", list, None)
    assert [each.error for each in groups] == [ended.value, None, ended.value, None]


@ANY_ORDER
def test_what_the_first_source_publishes_ends_the_transfers_of_the_others(
    cuda: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It alone learns that an engine is lost; the other source and this worker wait for that engine."""
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "4")
    ranks = [(source, rank) for source in range(2) for rank in range(2)]
    first, worker, other, same_worker = cuda.processes(
        *[lambda where=where: Members("127.0.0.1", 29_500 + where[0], where[1], 2) for where in ranks]
    )
    groups: list[Any] = [worker, same_worker]

    def receive() -> None:
        with ExitStack() as syncs:
            receiving._begin(syncs, groups)
            wait(same_worker)

    def wait(members: Members) -> None:
        forwarding = Background(lambda: threading.Event().wait(2 * SECONDS))
        end = time.monotonic() + SECONDS / 2
        members.wait_for_transfer(ended(forwarding, end), lambda error: members.failure("bucket 2", error))

    with pytest.raises(PeerError), first.syncing():
        raise PeerError("engine 1 is lost")
    with pytest.raises(SyncError, match=r"another trainer rank: rank 0 .*: PeerError: engine 1 is lost"):
        receive()
    with pytest.raises(SyncError, match=r"rank 1 .*: PeerError: engine 1 is lost"), other.syncing():
        wait(other)


@ANY_ORDER
def test_a_source_that_only_waits_in_vain_does_not_end_the_transfers_of_others(
    cuda: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped source is the cause: all ranks reach their deadlines, and this worker names that source."""
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "1")
    first, worker = cuda.processes(
        *[lambda rank=rank: Members("127.0.0.1", 29_500, rank, 2) for rank in (0, 1)]
    )
    first._publish_failure("bucket 1")
    worker.raise_failure()
    assert worker._failed_state() == "bucket 1"
