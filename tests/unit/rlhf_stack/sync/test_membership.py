"""Ranks of a group whose rank 0 is frozen, or of which some are busy; real stores are in tests/cluster."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from rlhf_stack import sync
from rlhf_stack.cluster.host import free_port
from rlhf_stack.config import env_vars
from rlhf_stack.sync.membership import Members

from tests.unit import fake_cuda
from tests.unit.fake_cuda import ANY_ORDER, SECONDS, Gpu

HOST = "127.0.0.1"


@pytest.fixture
def frozen(cuda: Gpu, monkeypatch: pytest.MonkeyPatch) -> Members:
    """Rank 1 of two, whose rank 0 answers no request any more; the deadline is 1 s."""
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "1")
    port = free_port(HOST)
    members = cuda.processes(*[lambda rank=rank: Members(HOST, port, rank, 2) for rank in range(2)])

    def freeze(*_: Any, **__: Any) -> None:
        threading.Event().wait(2 * SECONDS)

    for name in ("set", "get", "multi_get", "check", "wait", "delete_key"):
        monkeypatch.setattr(fake_cuda.Store, name, freeze)
    monkeypatch.setattr("torch.distributed.TCPStore", freeze)
    found: Members = members[1]
    return found


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
            "has stopped waiting or does not answer",
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
