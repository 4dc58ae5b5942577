"""Which trainer ranks send the weights, and how they join; syncs between processes are in tests/cluster."""

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from rlhf_stack.accelerator import devices
from rlhf_stack.cluster.actor_registry import PeerError
from rlhf_stack.config import env_vars
from rlhf_stack.sync import SyncError, actor_trainer, joining, sources
from rlhf_stack.sync.buckets import Share
from rlhf_stack.sync.gloo import GlooGroup
from rlhf_stack.sync.group import Watch
from rlhf_stack.sync.trainer import own_share

NODES = ("127.0.0.1", "127.0.0.2", "127.0.0.2")
ENGINES, TP = 2, 4
WORLD = 1 + ENGINES * TP


@pytest.mark.parametrize(
    ("nodes", "number", "expected"),
    [
        ("a", None, [0]),
        ("aab", None, [0, 2]),
        ("aabb", None, [0, 2]),
        ("abab", None, [0, 1]),
        ("abcdefghij", None, [*range(8)]),
        ("abcdefghij", 9, [*range(9)]),
        ("aabb", 1, [0]),
        ("aabb", 2, [0, 2]),
        ("aabb", 3, [0, 2, 1]),
        ("aabb", 4, [0, 2, 1, 3]),
    ],
)
def test_ranks_send_from_as_many_nodes_as_possible(
    nodes: str, number: int | None, expected: list[int]
) -> None:
    assert sources.select(nodes, number) == expected


def test_more_sources_than_ranks_are_refused() -> None:
    with pytest.raises(SyncError, match="RLHF_STACK_SYNC_SOURCES=3: the trainer has 2 ranks"):
        sources.select("ab", 3)


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "x", "1000", "\uff12"])
def test_a_wrong_number_of_sources_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.SYNC_SOURCES, value)
    with pytest.raises(ValueError, match="RLHF_STACK_SYNC_SOURCES="):
        env_vars.sync_sources()


def test_every_bucket_has_one_source() -> None:
    for ranks in (1, 2, 3):
        for buckets in range(6):
            shares = [Share(rank, ranks).of(buckets) for rank in range(ranks)]
            for number in range(buckets):
                assert [share.has(number) for share in shares].count(True) == 1


class Trainers:
    """A thread for each trainer rank, with a group of torch's that gathers objects."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self._number, self._own = number, threading.local()
        self._barrier, self._shared = threading.Barrier(number, timeout=20), [None] * number
        for name in ("get_rank", "get_world_size", "all_gather_object"):
            monkeypatch.setattr(f"torch.distributed.{name}", getattr(self, name), raising=False)

    def get_rank(self) -> int:
        return int(self._own.rank)

    def get_world_size(self) -> int:
        return self._number

    def all_gather_object(self, objects: list[Any], own: Any) -> None:
        self._shared[self._own.rank] = own
        self._barrier.wait()
        objects[:] = self._shared
        self._barrier.wait()

    def run(self, action: Callable[[int], Any]) -> list[Any]:
        """Return by rank what ``action`` returns or raises."""

        def act(rank: int) -> Any:
            self._own.rank = rank
            try:
                return action(rank)
            except SyncError as error:
                return error

        with ThreadPoolExecutor(self._number) as pool:
            return list(pool.map(act, range(self._number)))


@pytest.fixture
def trainers(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> Trainers:
    return Trainers(monkeypatch, len(NODES))


def trainer(group: Any) -> Any:
    """A trainer rank, with ``group`` on rank 0."""
    arguments = SimpleNamespace(
        vllm=SimpleNamespace(tensor_parallel_size=TP, sync_backend="gloo"),
        train=SimpleNamespace(colocate_all=False, async_enable=False),
    )
    found = SimpleNamespace(strategy=SimpleNamespace(args=arguments), vllm_engines=["engine"] * ENGINES)
    if group is not None:
        found._model_update_group = group
    return found


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch, trainers: Trainers) -> Iterator[list[Any]]:
    """The calls with which groups are joined; no other process could take the ports meanwhile."""
    calls: list[Any] = []

    def engine_calls(engines: Sequence[str]) -> list[Callable[..., None]]:
        return [called for _ in engines]

    def called(method: str, *rest: Any) -> None:
        for endpoint in rest[0] if method == "join_weight_sources" else [rest[:2]]:
            expect_taken(*endpoint)
        calls.append((method, *rest))

    def create_group(host: str, port: int, *rest: Any, **_: Any) -> str:
        expect_taken(host, port)
        calls.append((host, port, *rest[:-1]))
        served.append(socket.socket(fileno=rest[-1].detach()))
        return "a group of its own"

    def expect_taken(host: str, port: int) -> None:
        with pytest.raises(OSError, match="in use"):
            socket.create_server((host, port))

    served: list[socket.socket] = []
    util = SimpleNamespace(get_node_ip_address=lambda: NODES[trainers.get_rank()])
    for module in (joining, sources):
        monkeypatch.setattr(module, "engine_calls", engine_calls)
        monkeypatch.setattr(module, "wait_for_engine_results", lambda *_: None)
        monkeypatch.setattr(module, "ray", SimpleNamespace(util=util))
        monkeypatch.setattr(module, "create_group", create_group)
    monkeypatch.setattr(devices, "current_device", lambda: "cpu")
    yield calls
    for listener in served:
        listener.close()


def test_a_rank_on_each_node_joins_all_engine_workers(trainers: Trainers, joined: list[Any]) -> None:
    ranks = [trainer(GlooGroup.__new__(GlooGroup)), trainer(None), trainer(None)]
    assert trainers.run(lambda rank: sources.join(ranks[rank])) == [None] * 3
    (endpoints,) = {tuple(call[1]) for call in joined if call[0] == "join_weight_sources"}
    ((host, port),) = endpoints
    assert host == NODES[1]
    assert sorted(joined, key=str) == sorted(
        [
            (host, port, 0, WORLD, "cpu", "gloo"),
            ("join_weight_sources", [(host, port)], 1, WORLD),
            ("join_weight_sources", [(host, port)], 1 + TP, WORLD),
        ],
        key=str,
    )
    assert [own_share(each) for each in ranks] == [Share(0, 2), Share(1, 2), Share(0, 2)]
    assert ranks[1]._model_update_group == "a group of its own"
    assert not hasattr(ranks[2], "_model_update_group")


def test_rank_0_listens_before_the_engines_know_the_port(trainers: Trainers, joined: list[Any]) -> None:
    rank = trainer(None)
    trainers.run(lambda number: None if number else joining.join_engines(rank))
    host, port, *_ = joined[-1]
    assert host == NODES[0]
    assert joined == [
        ("join_weight_group", host, port, 1, WORLD, "gloo"),
        ("join_weight_group", host, port, 1 + TP, WORLD, "gloo"),
        (host, port, 0, WORLD, "cpu", "gloo"),
    ]
    assert rank._model_update_group == "a group of its own"


def test_the_formation_of_a_group_ends_when_an_engine_is_lost(
    trainers: Trainers, joined: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(references: Sequence[Any]) -> None:
        assert len(references) == ENGINES
        raise PeerError("engine 1 is dead")

    def create_group(*_: Any, watch: Watch) -> None:
        watch()

    monkeypatch.setattr(joining, "raise_engine_error", lost)
    monkeypatch.setattr(joining, "create_group", create_group)
    errors = trainers.run(lambda rank: None if rank else join_alone())
    assert (type(errors[0]), str(errors[0])) == (PeerError, "engine 1 is dead")
    assert [method for method, *_ in joined] == ["join_weight_group"] * ENGINES


def join_alone() -> Exception | None:
    """Return the error with which rank 0 forms its group."""
    try:
        joining.join_engines(trainer(None))
    except PeerError as error:
        return error
    return None


def test_rank_0_ends_the_formation_of_the_other_groups_when_an_engine_is_lost(
    trainers: Trainers, joined: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the other sources, which do not know the engines' calls, wait for the deadline."""
    ended: list[Any] = []
    lost = MagicMock(side_effect=SyncError("engine 1 is dead"))
    monkeypatch.setattr(sources, "wait_for_engine_results", lost)
    monkeypatch.setattr(sources, "end_formation", lambda *call: ended.append(call))
    ranks = [trainer(GlooGroup.__new__(GlooGroup)), trainer(None), trainer(None)]
    found = trainers.run(lambda rank: sources.join(ranks[rank]))
    assert isinstance(found[0], SyncError)
    (endpoints,) = {tuple(call[1]) for call in joined if call[0] == "join_weight_sources"}
    assert ended == [(*endpoint, "engine 1 is dead") for endpoint in endpoints]


def test_over_nccl_rank_0_sends_alone(trainers: Trainers, joined: list[Any]) -> None:
    ranks = [trainer("a group of NCCL's"), trainer(None), trainer(None)]
    trainers.run(lambda rank: sources.join(ranks[rank]))
    assert [own_share(each) for each in ranks] == [Share(0, 1)] * 3
    assert joined == []


@pytest.mark.parametrize(("number", "expected"), [("auto", True), ("1", False), ("2", True)])
def test_several_ranks_send_unless_the_user_wants_one(
    trainers: Trainers, monkeypatch: pytest.MonkeyPatch, number: str, expected: bool
) -> None:
    monkeypatch.setenv(env_vars.SYNC_SOURCES, number)
    assert trainers.run(lambda _: sources.are_possible(trainer(None))) == [expected] * 3


class Closed:
    """A group that can be left."""

    closed = False

    def close(self) -> None:
        self.closed = True


def test_the_error_of_a_rank_is_raised_by_rank_0_when_all_have_ended(trainers: Trainers) -> None:
    groups = [Closed() for _ in NODES]
    ranks = [trainer(group) for group in groups]

    def step(rank: int) -> int:
        if rank == 2:
            raise SyncError("rank 1 on 10.0.0.9 does not answer")
        return rank

    found = trainers.run(lambda rank: actor_trainer._together(ranks[rank], lambda _: step(rank)))
    assert isinstance(found[0], SyncError)
    assert str(found[0]) == "rank 1 on 10.0.0.9 does not answer"
    assert found[1:] == [None, None], "they go on to the barrier at the end of the sync"
    assert [group.closed for group in groups] == [True] * 3
    assert trainers.run(lambda rank: actor_trainer._together(ranks[rank], lambda _: rank)) == [[0, 1, 2]] * 3


OWN, OTHER = PeerError("engine 1 is lost"), SyncError("rank 1 on 10.0.0.9 cannot listen")


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ((OWN, None, None), OWN),
        ((OWN, OTHER, OTHER), PeerError("engine 1 is lost; rank 1 on 10.0.0.9 cannot listen")),
        ((OTHER, OTHER, None), OTHER),
        ((None, OTHER, OTHER), OTHER),
    ],
    ids=["own", "both", "equal", "others"],
)
def test_rank_0_raises_the_reasons_of_all_ranks(
    trainers: Trainers, failures: Sequence[Exception | None], expected: Exception
) -> None:
    def step(rank: int) -> None:
        if (failure := failures[rank]) is not None:
            raise failure

    def together(rank: int) -> Any:
        try:
            return actor_trainer._together(trainer(Closed()), lambda _: step(rank))
        except PeerError as error:
            return error

    found = trainers.run(together)
    assert (type(found[0]), str(found[0])) == (type(expected), str(expected))
    assert found[1:] == [None, None]
