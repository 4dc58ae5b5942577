"""The gloo group between real processes: broadcasts, the selected backend, and ranks that do not join."""

import multiprocessing
import os
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ports import free_port
from ranks import DTYPES, as_bits, weights
from rlhf_stack import sync
from rlhf_stack.accelerator import devices
from rlhf_stack.cluster.actor_registry import PeerError
from rlhf_stack.config import env_vars
from rlhf_stack.sync import backend, backend_selection, membership
from rlhf_stack.sync.group import Buffers, unwatched
from rlhf_stack.sync.membership import Members
from rlhf_stack.sync.nccl import StreamGroup

WORLD = 3
FORK = multiprocessing.get_context("fork")
OPEN = []  # groups stay open, so that a finished rank does not leave while another still joins


def run_ranks(target, ranks=range(WORLD), seconds=60):
    """Return by rank what ``target(rank, port)`` returns or raises in a process per rank."""
    results, port = FORK.Queue(), free_port()

    def run(rank):
        try:
            results.put((rank, target(rank, port)))
        except BaseException as error:
            results.put((rank, error))
        signal.pause()  # until it is killed

    processes = [FORK.Process(target=run, args=(rank,), daemon=True) for rank in ranks]
    for process in processes:
        process.start()
    try:
        return dict(results.get(timeout=seconds) for _ in ranks)
    finally:
        for process in processes:
            process.kill()
            process.join()


def join(rank, port, name="gloo"):
    group = sync.create_group("127.0.0.1", port, rank, WORLD, torch.device("cpu"), name)
    OPEN.append(group)
    return group


@pytest.mark.timeout(150)
@pytest.mark.parametrize("source", [0, 2])
def test_every_dtype_and_shape_arrives_bit_for_bit(source):
    def exchange(rank, port):
        group, wrong = join(rank, port), []
        for dtype in DTYPES:
            for name, whole in weights(dtype):
                tensor = whole
                if rank != source:
                    tensor = torch.empty_like(whole)
                    tensor.untyped_storage().fill_(0)  # torch 2.3 has no zeros_like of 8-bit floats
                group.broadcast(tensor, src=source, stream=None)
                if not torch.equal(as_bits(tensor), as_bits(whole)):
                    wrong.append(f"{name} of {dtype}")
        return wrong

    assert run_ranks(exchange, seconds=140) == {rank: [] for rank in range(WORLD)}


@pytest.mark.timeout(90)
def test_the_default_group_is_not_created():
    def exchange(rank, port):
        join(rank, port)
        return dist.is_initialized()

    assert run_ranks(exchange) == dict.fromkeys(range(WORLD), False)


@pytest.mark.timeout(90)
def test_a_cpu_uses_gloo_for_nccl_with_a_warning(caplog):
    def exchange(rank, port):
        group = join(rank, port, "nccl")
        return group.name, caplog.text

    if devices.is_gpu():
        pytest.skip("this image is for GPUs, where nccl is nccl")
    found = run_ranks(exchange)
    assert [found[rank][0] for rank in range(WORLD)] == ["gloo"] * WORLD
    assert "needs GPUs" in found[0][1]


@pytest.mark.timeout(90)
def test_auto_selects_gloo_without_gpus_and_every_rank_logs_why(capfd):
    def exchange(rank, port):
        return join(rank, port, "auto").name

    if devices.is_gpu():
        pytest.skip("this image is for GPUs")
    assert run_ranks(exchange) == dict.fromkeys(range(WORLD), "gloo")
    log = capfd.readouterr().out
    for rank in ("rank 0 (the trainer)", "rank 1", "rank 2"):
        reason = "auto selects gloo: rank 0 (the trainer) on 127.0.0.1 has no GPU"
        assert f"weight sync, {rank} on 127.0.0.1: {reason}" in log


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (sync.SyncError("unhandled system error"), "unhandled system error"),
        (AssertionError(), "AssertionError"),
        (AttributeError("ncclCommInitRankConfig"), "ncclCommInitRankConfig"),
        (OSError(), "OSError"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_auto_selects_gloo_on_all_ranks_if_nccl_fails_on_one(monkeypatch, capfd, error, reason):
    class Failing:
        """A substitute for an NCCL group, which needs GPUs: rank 1 cannot join, the others wait."""

        def __init__(self, members, _device):
            self._members = members

        def join(self):
            if self._members.rank == 1:
                raise error
            self._members.connect_to_store().wait(["what rank 1 never sets"], timedelta(seconds=60))

        def close(self):
            """There is nothing to abort."""

    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "8")
    monkeypatch.setattr(
        backend_selection, "_own_device", lambda: backend_selection.RankDevice(str(os.getpid()), "")
    )
    monkeypatch.setattr(backend, "_nccl", Failing)

    def exchange(rank, port):
        group = join(rank, port, "auto")
        tensor = torch.full((3,), float(rank))
        group.broadcast(tensor, src=0, stream=None)
        return group.name, tensor.tolist()

    assert run_ranks(exchange) == dict.fromkeys(range(WORLD), ("gloo", [0.0] * 3))
    assert f"rank 1 on 127.0.0.1: {reason}" in capfd.readouterr().out


@pytest.mark.timeout(90)
def test_a_group_over_nccl_that_auto_selects_syncs_again_and_again(monkeypatch):
    """Only the group that was tried still refers to rank 0's store, which serves every sync."""

    class Joined(StreamGroup):
        """A substitute for an NCCL group, which needs GPUs: it joins, and its ranks sync over the store."""

        def __init__(self, members, _device):
            self.rank, self._members = members.rank, members
            self.device = torch.device("cpu")
            self.buffers = Buffers(self.device, pinned=False)

        def _join_communicator(self):
            """There is none."""

        def start(self, parts, _what):
            parts[0].copy_(torch.arange(len(parts[0]), dtype=torch.uint8))
            return SimpleNamespace(finish=lambda: None)

    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "8")
    monkeypatch.setattr(
        backend_selection, "_own_device", lambda: backend_selection.RankDevice(str(os.getpid()), "")
    )
    monkeypatch.setattr(backend, "_nccl", Joined)

    def exchange(rank, port):
        group = join(rank, port, "auto")
        for _ in range(3):
            with group.syncing():
                group._members.exchange("topic", str(rank), time.monotonic() + 8)
        return type(group).__name__

    assert run_ranks(exchange) == dict.fromkeys(range(WORLD), "Joined")


@pytest.mark.timeout(120)
def test_an_abandoned_nccl_trial_does_not_end_a_later_sync(monkeypatch):
    """The trial is closed while its group joins, and fails during a sync over gloo."""
    begun, published, closed = threading.Event(), threading.Event(), threading.Event()

    class Late:
        def __init__(self, members, _device):
            self._members = members

        def join(self):
            begun.wait(60)
            self._members.failure("nccl, joining the communicator", TimeoutError("ncclCommInitRank waits"))
            published.set()

        def close(self):
            closed.set()

    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "30")
    monkeypatch.setattr(backend_selection, "PROBE_SECONDS", 0.5)
    monkeypatch.setattr(membership, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(
        backend_selection, "_own_device", lambda: backend_selection.RankDevice(str(os.getpid()), "")
    )
    monkeypatch.setattr(backend, "_nccl", Late)

    def exchange(rank, port):
        group = join(rank, port, "auto")
        tensor = torch.full((3,), 7 if rank == 0 else 0, dtype=torch.uint8)
        with group.syncing():
            begun.set()
            if rank == 0:
                assert published.wait(60)
                time.sleep(1)  # the others look for a failure 10 times meanwhile
            held = group.buffers.for_bucket(3, 0)
            held.copy_(tensor) if rank == 0 or group.in_place else None
            transfer = group.start([held], "bucket 1 of 1")
            transfer.finish()
            received = held.tolist()
            if rank:
                transfer.release()
        return group.name, received, closed.wait(30)

    assert run_ranks(exchange, seconds=100) == dict.fromkeys(range(WORLD), ("gloo", [7] * 3, True))


@pytest.mark.timeout(60)
def test_a_rank_that_does_not_join_is_named_within_the_deadline(monkeypatch):
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "2")
    found = run_ranks(join, ranks=[0, 2])
    assert isinstance(found[0], sync.SyncError)
    assert "ranks [1] of 3 did not join within 2 s (RLHF_STACK_SYNC_TIMEOUT)" in str(found[0])
    assert isinstance(found[2], sync.SyncError), "also if rank 0, which serves the store, ended first"
    assert "join" in str(found[2])
    assert "within 2 s" in str(found[2])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("named", ["gloo", "auto"])
def test_the_formation_of_a_group_ends_on_all_ranks_when_a_watch_raises(monkeypatch, named):
    """Rank 2 never joins: its engine is lost, of which only rank 0 learns."""
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "200")
    begun = time.monotonic()

    def watch():
        if time.monotonic() > begun + 2:
            raise PeerError("engine 1 is dead")

    def exchange(rank, port):
        where = "127.0.0.1", port, rank, WORLD, torch.device("cpu"), named
        return sync.create_group(*where, watch=unwatched if rank else watch)

    found = run_ranks(exchange, ranks=[0, 1], seconds=40)
    assert (type(found[0]), str(found[0])) == (PeerError, "engine 1 is dead")
    assert isinstance(found[1], sync.SyncError)
    assert "another rank failed first: PeerError: engine 1 is dead" in str(found[1])


@pytest.mark.timeout(60)
def test_another_process_ends_the_formation_of_a_group(monkeypatch):
    """As rank 0 of the trainer does for another rank that sends, when an engine is lost."""
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "200")

    def exchange(rank, port):
        if rank:
            return membership.end_formation("127.0.0.1", port, "engine 1 is dead")
        return join(rank, port)

    found = run_ranks(exchange, ranks=[0, 1], seconds=40)
    assert isinstance(found[0], sync.SyncError)
    assert str(found[0]).endswith("another rank failed first: engine 1 is dead")


class SlowStore:
    """A store on a busy machine: no answer arrives within 50 ms."""

    def __init__(self, store):
        self._store = store

    def __getattr__(self, name):
        return getattr(self._store, name)

    def wait(self, keys, timeout):
        if timeout < timedelta(milliseconds=50):
            raise RuntimeError("timeout")
        self._store.wait(keys, timeout)


@pytest.mark.timeout(60)
def test_a_rank_that_has_published_its_failure_is_not_diagnosed_as_unresponsive(monkeypatch):
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "8")

    def exchange(rank, port):
        members = Members("127.0.0.1", port, rank, WORLD)
        OPEN.append(members)
        members.store = SlowStore(members.store)
        return str(members.failure("bucket 1 of 1", RuntimeError("cut"))) if rank != 1 else ""

    found = run_ranks(exchange)
    for rank in (0, 2):
        assert "bucket 1 of 1: rank 1 on 127.0.0.1 does not answer: dead, stopped or cut off" in found[rank]


@pytest.mark.timeout(60)
def test_an_unreachable_trainer_is_named_within_the_deadline(monkeypatch):
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "2")
    port = free_port()
    with pytest.raises(sync.SyncError, match=rf"rank 0 \(the trainer\) is not reachable at 127.0.0.1:{port}"):
        sync.create_group("127.0.0.1", port, 1, WORLD, torch.device("cpu"), "gloo")


def freeze(process):
    """Stop a process, and wait until no thread of it runs: until then its store still answers."""
    os.kill(process, signal.SIGSTOP)
    threads = list(Path(f"/proc/{process}/task").glob("*/stat"))
    while any(stat.read_text().rpartition(")")[2].split()[0] != "T" for stat in threads):
        time.sleep(0.01)


@pytest.mark.timeout(120)
def test_a_frozen_trainer_is_named_within_the_deadline(monkeypatch):
    """Its store accepts connections and answers nothing, which no timeout of the store ends."""
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "4")

    def begin_sync(members):
        members._sync = 1
        with members.syncing():
            """Nothing is sent."""

    def exchange(rank, port):
        members = Members("127.0.0.1", port, rank, 2)
        OPEN.append(members)
        trainer, _ = members.exchange("process", str(os.getpid()), time.monotonic() + 4)
        if rank == 0:
            return [], 0
        time.sleep(1)  # rank 0 returns
        freeze(int(trainer))
        errors, begun = [], time.monotonic()
        for action in (
            begin_sync,
            lambda members: members.exchange("topic", "", time.monotonic() + 4),
            lambda members: members.failure("bucket 1 of 9", RuntimeError("late")),
            Members.connect_to_store,
        ):
            try:
                errors.append(str(action(members)))
            except sync.SyncError as error:
                errors.append(str(error))
        return errors, time.monotonic() - begun

    errors, seconds = run_ranks(exchange, range(2), seconds=100)[1]
    begun, exchanged, failed, connected = errors
    assert "beginning a sync: rank 0 (the trainer) on 127.0.0.1 does not answer: dead" in begun
    assert "rank 0 at 127.0.0.1 has stopped waiting or does not answer within 4 s" in exchanged
    assert "bucket 1 of 9: rank 0 (the trainer) on 127.0.0.1 does not answer" in failed
    assert "rank 0 (the trainer) is not reachable at 127.0.0.1" in connected
    assert seconds < 60


@pytest.mark.timeout(60)
def test_the_store_listens_at_the_address_of_the_run_alone(monkeypatch):
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "5")
    port = free_port()
    members = Members("127.0.0.1", port, 0, 1)
    assert members.addresses == ["127.0.0.1"]
    socket.create_connection(("127.0.0.1", port), 5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 5)


@pytest.mark.timeout(60)
def test_the_store_is_served_by_a_socket_that_listened_before(monkeypatch):
    """So that no other process takes the port between its publication and the group."""
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "5")
    listener = membership.listen("127.0.0.1")
    port, file = listener.getsockname()[1], listener.fileno()
    members = Members("127.0.0.1", port, 0, 1, listener)
    members.connect_to_store().set("key", "value")
    assert members.store.get("key") == b"value"
    assert (listener.fileno(), socket.socket(fileno=os.dup(file)).getsockname()[1]) == (-1, port)


def test_a_port_in_use_is_named_at_once():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(sync.SyncError, match=rf"cannot listen at 127.0.0.1:{port}: .*in use"):
            Members("127.0.0.1", port, 0, 1)


def test_an_address_behind_nat_is_served_on_all_interfaces_with_a_warning(caplog):
    with membership.listen("192.0.2.1") as listener:
        socket.create_connection(("127.0.0.2", listener.getsockname()[1]), 5).close()
    assert "192.0.2.1 is not an address of this node" in caplog.text


class Counting:
    """A store that counts requests, without the questions of a rank that waits: time bounds their number."""

    def __init__(self, store):
        self._store, self.requests = store, 0

    def __getattr__(self, name):
        self.requests += name != "check"
        return getattr(self._store, name)


@pytest.mark.timeout(120)
def test_the_requests_of_a_rank_do_not_grow_with_the_number_of_ranks(monkeypatch):
    """8001 ranks: the trainer and one engine worker are real, the others are keys of one connection."""
    world = 8001
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "60")

    def exchange(rank, port):
        if rank == 2:
            store = dist.TCPStore(
                "127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False
            )
            for topic in ("address", "topic"):
                ranks = range(2, world)
                store.multi_set([f"{topic}/{other}" for other in ranks], [str(other) for other in ranks])
            OPEN.append(store)
            return 0
        members = Members("127.0.0.1", port, rank, world)
        OPEN.append(members)
        members.store = Counting(members.store)
        values = members.exchange("topic", str(rank), time.monotonic() + 60)
        assert values == [str(other) for other in range(world)]
        return members.store.requests

    found = run_ranks(exchange, seconds=100)
    assert found[0] <= 3
    assert found[1] <= 2
