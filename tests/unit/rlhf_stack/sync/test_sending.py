"""The trainer's side of a sync while its engines fail; syncs between processes are in tests/cluster."""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import MagicMock

import pytest
from rlhf_stack.cluster.actor_registry import PeerError
from rlhf_stack.sync import same_gpu, sending
from rlhf_stack.sync.encoding import Encodings
from rlhf_stack.sync.errors import SyncError
from rlhf_stack.sync.group import Watch


class Group:
    """A group whose transfers wait until its watch raises."""

    encodings = Encodings(0, "off", 50)
    answers: ClassVar[dict[int, dict[str, Any]]] = {}

    @contextmanager
    def syncing(self, watch: Watch) -> Iterator[None]:
        self.watch = watch
        yield


def gather_into(
    monkeypatch: pytest.MonkeyPatch, calls: list[Any], buckets: int, name: Callable[[int], Any]
) -> MagicMock:
    """Let a trainer send empty buckets, one at a time; ``calls`` gets the name of each that is gathered.

    Returns the sender.
    """

    @contextmanager
    def gather(_: Any, __: Any, linked: Sequence[tuple[int, Any]]) -> Iterator[None]:
        calls.extend(name(number) for number, _ in linked)
        yield

    sender = MagicMock()
    monkeypatch.setattr(sending, "engine_parameters", lambda *_: [])
    monkeypatch.setattr(sending, "plan_buckets", lambda *_: [SimpleNamespace(spans=[])] * buckets)
    monkeypatch.setattr(sending, "linked_buckets", lambda buckets, _: [[each] for each in enumerate(buckets)])
    monkeypatch.setattr(sending, "_gathered", gather)
    monkeypatch.setattr(sending, "new_sender", lambda *_: sender)
    return sender


def test_the_memory_that_is_left_is_the_least_of_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    here = [5]
    monkeypatch.setattr(sending, "available_memory", lambda: here[0])
    assert sending.least_memory_left({}) == 5
    answers = {0: {"ranks": [{"memory_left": 9}, {"memory_left": 4}]}, 2: {"ranks": [{"memory_left": 7}]}}
    assert sending.least_memory_left(answers) == 4
    here[0] = 3
    assert sending.least_memory_left(answers) == 3


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_in_flight_over_nccl_while_shards_are_gathered(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """DeepSpeed's gather waits for all work of the GPU, so that no deadline of a broadcast would hold."""
    calls: list[str] = []
    sender = gather_into(monkeypatch, calls, 2, lambda number: f"gather {number}")

    def finish() -> None:
        calls.append("finish")
        if fails and "send 0" in calls:
            raise SyncError("bucket 1 of 2 is late")

    sender.finish.side_effect = finish
    sender.send.side_effect = lambda number, *_: calls.append(f"send {number}")
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1, raising=False)
    monkeypatch.setattr(sending, "is_sharded", lambda _: True)
    monkeypatch.setattr(sending, "StreamGroup", Group)
    trainer = SimpleNamespace(_model_update_group=Group(), strategy=SimpleNamespace(args=SimpleNamespace()))
    if fails:
        with pytest.raises(SyncError, match="bucket 1 of 2 is late"):
            sending.send(trainer, [])
        assert calls == ["finish", "gather 0", "send 0", "finish", "gather 1"]
    else:
        sending.send(trainer, [])
        assert calls == ["finish", "gather 0", "send 0", "finish", "gather 1", "send 1", "finish"]


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("sharded", [False, True])
def test_a_lost_engine_ends_the_transfer_and_shards_are_gathered_to_the_end(
    monkeypatch: pytest.MonkeyPatch, sharded: bool
) -> None:
    """Other trainer ranks wait in each collective that gathers shards."""
    gathered: list[int] = []
    sender = gather_into(monkeypatch, gathered, 3, int)

    def lost(references: Sequence[str]) -> None:
        raise PeerError(f"{references[-1]} is dead")

    group = Group()
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0, raising=False)
    monkeypatch.setattr(sending, "is_sharded", lambda _: sharded)
    monkeypatch.setattr(sending, "raise_engine_error", lost)
    sender.send.side_effect = lambda *_: group.watch()
    engines = [SimpleNamespace(receive_weights=SimpleNamespace(remote=lambda *_, **__: "engine 0"))]
    strategy = SimpleNamespace(args=SimpleNamespace())
    trainer = SimpleNamespace(_model_update_group=group, vllm_engines=engines, strategy=strategy)
    with pytest.raises(PeerError, match="engine 0 is dead"):
        sending.send(trainer, [])
    assert gathered == ([0, 1, 2] if sharded else [0])


def test_a_lost_engine_ends_the_wait_for_its_worker_on_the_same_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_gpu, "POLL_SECONDS", 0.01)
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with own, other:
        link = same_gpu.Link(own, "the engine worker on GPU 3")
        link.watch = MagicMock(side_effect=PeerError("engine 0 is dead"))
        with pytest.raises(PeerError, match="engine 0 is dead"):
            link.receive("to load bucket 2 of 9")
