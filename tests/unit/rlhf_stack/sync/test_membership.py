"""Ranks of a group whose rank 0 is frozen, or of which some are busy; real stores are in tests/cluster."""

import copy
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import MagicMock

import pytest
from rlhf_stack import sync
from rlhf_stack.cluster.actor_registry import PeerError
from rlhf_stack.config import env_vars
from rlhf_stack.sync import membership
from rlhf_stack.sync.group import Watch, unwatched
from rlhf_stack.sync.membership import CAUSE, DONE, Members

from tests.unit import fake_cuda
from tests.unit.fake_cuda import ANY_ORDER, SECONDS, Gpu

HOST, PORT = "127.0.0.1", 29_500  # of the fake store


def joined(cuda: Gpu, world: int) -> list[Members]:
    found: list[Members] = cuda.processes(
        *[lambda rank=rank: Members(HOST, PORT, rank, world) for rank in range(world)]
    )
    return found


@pytest.fixture
def frozen(cuda: Gpu, monkeypatch: pytest.MonkeyPatch) -> Members:
    """Rank 1 of two, whose rank 0 answers no request any more; the deadline is 1 s."""
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "1")
    members = joined(cuda, 2)

    def freeze(*_: Any, **__: Any) -> None:
        threading.Event().wait(2 * SECONDS)

    for name in ("set", "get", "multi_get", "check", "wait", "compare_set", "delete_key"):
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
        (exchange, "rank 0 at 127.0.0.1 has stopped waiting or does not answer"),
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

    watch = MagicMock(side_effect=PeerError("engine 3 is dead"))

    def wait(members: Members, watch: Watch) -> None:
        with members.syncing(watch):
            members.wait_for_transfer(lambda _: False, lambda error: members.failure("a bucket", error))

    with pytest.raises(PeerError, match="engine 3 is dead"):
        wait(first, watch)
    with pytest.raises(sync.SyncError, match=r"rank 0 .*: PeerError: engine 3 is dead"):
        wait(other, unwatched)


@ANY_ORDER
def test_what_a_watch_raises_ends_the_formation_of_a_group_on_all_its_ranks(
    cuda: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 2 of three never joins: the call to its engine has ended with an error."""
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, str(10 * SECONDS))
    monkeypatch.setattr(membership, "POLL_SECONDS", 0.05)
    waits = threading.Event()

    def watch() -> None:
        if waits.is_set():
            raise PeerError("engine 1 is dead")

    def join() -> None:
        waits.set()
        Members(HOST, PORT, 1, 3)

    first, other = cuda.processes(lambda: Members(HOST, PORT, 0, 3, watch=watch), join)
    assert (type(first), str(first)) == (PeerError, "engine 1 is dead")
    assert isinstance(other, sync.SyncError)
    assert str(other).endswith("rank 1 on 127.0.0.1: another rank failed first: PeerError: engine 1 is dead")


@ANY_ORDER
def test_another_process_ends_the_formation_of_a_group(cuda: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, str(10 * SECONDS))
    monkeypatch.setattr(membership, "POLL_SECONDS", 0.05)
    (error, _) = cuda.processes(
        lambda: Members(HOST, PORT, 0, 2),
        lambda: membership.end_formation(HOST, PORT, "engine 1 is dead"),
    )
    assert isinstance(error, sync.SyncError)
    assert str(error) == "weight sync, rank 0 on 127.0.0.1: another rank failed first: engine 1 is dead"


class CountedStore:
    """A store that counts the requests of one rank."""

    def __init__(self, store: Any) -> None:
        self._store, self.requests = store, 0

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        return getattr(self._store, name)


MANY, FINDER = 8001, 17


def many(cuda: Gpu) -> list[Members]:
    """A group of `MANY` ranks with one store, eight on each node."""
    (one,) = joined(cuda, 1)
    found, addresses = [], [f"node-{rank // 8}" for rank in range(MANY)]
    for rank in range(MANY):
        found.append(copy.copy(one))
        found[-1].rank, found[-1].world, found[-1].store = rank, MANY, CountedStore(one.store)
        found[-1].addresses = addresses
    return found


@ANY_ORDER
@pytest.mark.parametrize(
    ("states", "lost", "expected"),
    [
        ({0: DONE}, [4711], "rank 4711 on node-588 does not answer: dead, stopped or cut off"),
        ({4711: f"{CAUSE}the loader"}, [], "rank 4711 on node-588: the loader"),
        ({}, range(4000, 4008), "rank 4000 on node-500, rank 4001 on node-500, .* do not answer: dead"),
        ({}, [], r"rank 0 \(the trainer\) on node-0: bucket 3; .*; and 7985 more ranks"),
    ],
    ids=["lost", "cause", "lost node", "no cause"],
)
def test_one_rank_of_thousands_finds_the_cause_and_the_others_read_it_with_few_requests(
    cuda: Gpu,
    monkeypatch: pytest.MonkeyPatch,
    states: dict[int, str],
    lost: Sequence[int],
    expected: str,
) -> None:
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "8")
    group = many(cuda)
    failing = [rank for rank in range(MANY) if rank not in states and rank not in lost]
    for rank, state in states.items():
        group[rank]._publish_failure(state)
    for rank in failing:
        group[rank]._publish_failure("bucket 3")
    errors = {}
    others = [rank for rank in reversed(failing) if rank != FINDER]  # rank 0, the last, waits for the others
    for rank in (FINDER, *others):
        errors[rank] = str(group[rank].failure("bucket 3", RuntimeError("cut off")))
    causes = {error.partition("bucket 3: ")[2] for error in errors.values()}
    assert len(causes) == 1
    assert re.match(expected, causes.pop())
    requests = [group[rank].store.requests for rank in others if rank]
    assert max(requests) <= 9, "the failure is published twice here"
    assert group[FINDER].store.requests <= 9 + 2 * 8 * 14, "it halves the ranks for each that is lost"
    assert group[0].store.requests <= 12


def fail_bucket(members: Members) -> str:
    return str(members.failure("a bucket", RuntimeError("cut off")))


@ANY_ORDER
@pytest.mark.parametrize("ended", [False, True], ids=["far", "ended"])
def test_a_rank_that_finds_no_cause_in_time_is_succeeded(
    cuda: Gpu, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    """Rank 2 was to find the cause: it is slow, or its process has ended with that of rank 3."""
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "1")
    _, other, far, third = joined(cuda, 4)
    far._claim("")
    if not ended:
        for members in (far, third):
            members._publish_failure("a bucket")
    other.store.set(other._key(0), DONE)
    error = fail_bucket(other)
    if ended:
        assert "rank 2 on 127.0.0.1, rank 3 on 127.0.0.1 do not answer" in error
    else:
        assert "rank 2 on 127.0.0.1: a bucket; rank 3 on 127.0.0.1: a bucket" in error
        assert "answer" not in error


@ANY_ORDER
def test_a_rank_that_was_found_unresponsive_finds_the_cause_itself(
    cuda: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 gathers with the other ranks of the trainer to the end, and fails only then; rank 2 is lost."""
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "1")
    first, other, _lost, late = joined(cuda, 4)
    assert "rank 0 (the trainer) on 127.0.0.1, rank 2 on 127.0.0.1, rank 3" in fail_bucket(other)
    assert "a bucket: rank 2 on 127.0.0.1, rank 3 on 127.0.0.1 do not answer" in fail_bucket(first)
    assert "a bucket: rank 2 on 127.0.0.1 does not answer" in fail_bucket(late)


@ANY_ORDER
def test_a_store_that_answers_slowly_gives_ranges_of_ranks(
    cuda: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes of eight ranks are lost; each request takes a tenth of the time for them."""
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "1")
    finder = many(cuda)[FINDER]
    for rank in range(MANY):
        if not 4000 <= rank < 4016:
            finder.store.set(finder._key(rank), "bucket 3")
    check = fake_cuda.Store.check

    def slow(store: Any, keys: Sequence[str]) -> bool:
        time.sleep(0.0125)
        return check(store, keys)

    keys = [finder._key(rank) for rank in range(MANY)]
    monkeypatch.setattr(fake_cuda.Store, "check", slow)
    present, absent = finder._split(keys)
    assert absent
    assert {rank for part in absent for rank in part} >= set(range(4000, 4016))
    assert not set(present) & {rank for part in absent for rank in part}
    assert re.match("some of the ranks .* do not answer", finder._unresponsive(absent))
