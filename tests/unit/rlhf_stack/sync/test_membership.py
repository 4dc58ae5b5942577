"""Ranks of a group whose rank 0 is frozen, or of which some are busy; real stores are in tests/cluster."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from rlhf_stack import sync
from rlhf_stack.cluster.actor_registry import PeerError
from rlhf_stack.cluster.host import free_port
from rlhf_stack.config import env_vars
from rlhf_stack.sync.group import Watch, unwatched
from rlhf_stack.sync.membership import Members

from tests.unit import fake_cuda
from tests.unit.fake_cuda import ANY_ORDER, SECONDS, Gpu

HOST = "127.0.0.1"


def joined(cuda: Gpu, world: int) -> list[Members]:
    port = free_port(HOST)
    found: list[Members] = cuda.processes(
        *[lambda rank=rank: Members(HOST, port, rank, world) for rank in range(world)]
    )
    return found


@pytest.fixture
def frozen(cuda: Gpu, monkeypatch: pytest.MonkeyPatch) -> Members:
    """Rank 1 of two, whose rank 0 answers no request any more; the deadline is 1 s."""
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "1")
    members = joined(cuda, 2)

    def freeze(*_: Any, **__: Any) -> None:
        threading.Event().wait(2 * SECONDS)

    for name in ("set", "get", "multi_get", "check", "wait", "delete_key"):
        monkeypatch.setattr(fake_cuda.Store, name, freeze)
    monkeypatch.setattr("torch.distributed.TCPStore", freeze)
    found: Members = members[1]
    return found


def exchange(members: Members) -> None:
    members.exchange("topic", "", time.monotonic() + 1)


def begin_sync(members: Members) -> None:
    with members.syncing():
        """Nothing is sent."""


def begin_another_sync(members: Members) -> None:
    members._sync = 1
    begin_sync(members)


@ANY_ORDER
@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (
            lambda one: one.exchange("topic", "", time.monotonic() + 1),
            "rank 0 has stopped waiting or does not answer",
        ),
        (begin_sync, "ending a sync: rank 0 .* does not answer: dead, stopped or cut off"),
        (begin_another_sync, "beginning a sync: rank 0 .* does not answer: dead, stopped or cut off"),
        (Members.connect_to_store, r"rank 0 \(the trainer\) is not reachable at 127.0.0.1:.* within 1 s"),
    ],
    ids=["exchange", "end", "begin", "connect"],
)
def test_no_request_to_a_frozen_rank_0_lasts_longer_than_the_deadline(
    frozen: Members, action: Callable[[Members], Any], expected: str
) -> None:
    begun = time.monotonic()
    with pytest.raises(sync.SyncError, match=rf"^weight sync, rank 1 .*{expected}"):
        action(frozen)
    assert time.monotonic() - begun < SECONDS / 4


def fail(members: Members) -> None:
    with members.syncing():
        raise ZeroDivisionError("the loader")


@ANY_ORDER
def test_the_cause_is_named_before_ranks_that_are_busy(cuda: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "2")
    first, failed, _busy = joined(cuda, 3)
    with pytest.raises(ZeroDivisionError):
        fail(failed)
    with (
        pytest.raises(sync.SyncError, match=r"rank 1 .*: the loader; rank 2 .* does not answer"),
        first.syncing(),
    ):
        first.wait_for_transfer(lambda _: False, lambda error: first.failure("a bucket", error))


@ANY_ORDER
def test_what_a_watch_raises_ends_a_transfer_and_is_the_cause_for_the_others(
    cuda: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "2")
    first, other = joined(cuda, 2)

    def watch() -> None:
        raise PeerError("engine 3 is dead")

    def wait(members: Members, watch: Watch) -> None:
        with members.syncing(watch):
            members.wait_for_transfer(lambda _: False, lambda error: members.failure("a bucket", error))

    with pytest.raises(PeerError, match="engine 3 is dead"):
        wait(first, watch)
    with pytest.raises(sync.SyncError, match=r"rank 0 .*: PeerError: engine 3 is dead"):
        wait(other, unwatched)
