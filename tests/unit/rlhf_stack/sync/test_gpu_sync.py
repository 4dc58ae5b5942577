"""Syncs between GPUs: every byte arrives in any order of streams, deadlines hold, and memory is freed."""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from rlhf_stack import sync
from rlhf_stack.accelerator import devices
from rlhf_stack.cluster.actor_registry import PeerError
from rlhf_stack.config import env_vars
from rlhf_stack.sync import backend_selection, gloo, nccl, same_gpu
from rlhf_stack.sync.buckets import LARGE, ParameterSpec, plan_buckets
from rlhf_stack.sync.receiving import receive
from rlhf_stack.sync.sending import BucketSender
from rlhf_stack.telemetry import run_log

from tests.unit.fake_cuda import ANY_ORDER, GPU, SECONDS, Gpu, Tensor, empty, tensor

HOST, PORT = "127.0.0.1", 29_500  # of the fake store
DEADLINE = "4"  # of which a quarter is for the diagnosis
LIMIT = LARGE + 1000  # bytes of a bucket: one tensor is sent from its own memory, one in two buckets
SIZES = (7, 300_000, 0, 90_000, 90_000, 90_000, 90_000, 90_000, LARGE // 4 + 10, 0, LARGE // 2, 5)
SPECS = [ParameterSpec(f"w{index}", "float32", (size,), 4 * size) for index, size in enumerate(SIZES)]
BUCKETS = plan_buckets(SPECS, LIMIT)
SYNCS = 3


@pytest.fixture(autouse=True)
def image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.ACCELERATOR, "cuda")
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "20")
    monkeypatch.setenv(env_vars.SYNC_BUCKET, str(LIMIT / 10**6))


def content(number: int) -> list[Any]:
    """The weights of a sync."""
    random = np.random.default_rng(number)
    return [random.random(size, np.float32) for size in SIZES]


def train_and_send(group: Any, until: Callable[[], object] = bool) -> int:
    """Send new weights, which the device still computes, in each sync; return the bytes that remain."""
    weights = [empty(size, np.dtype("float32"), f"cuda:{devices.current_device()}") for size in SIZES]
    for number in range(SYNCS):
        for weight, new in zip(weights, content(number), strict=True):
            weight.copy_(tensor(new, "cpu"))
        with group.syncing():
            sender = BucketSender(group, in_place=True)
            for index, bucket in enumerate(BUCKETS):
                sender.send(index, bucket, [weights[span.index] for span in bucket.spans])
            sender.finish()
    until()
    return reserved(weights)


def load_all(group: Any, keep: bool) -> tuple[bool, int]:
    """Receive all syncs into a model; was every byte equal after each, and the bytes that remain reserved."""
    where = f"cuda:{devices.current_device()}"
    model = {spec.name: empty(spec.shape, np.dtype("float32"), where) for spec in SPECS}

    def load(named: Sequence[tuple[str, Tensor]]) -> None:
        for name, value in named:
            model[name].copy_(value)

    parameters, equal = [astuple(spec) for spec in SPECS], True
    for number in range(SYNCS):
        receive([group], parameters, LIMIT, devices.torch_device(), load, "float32", load_keeps=keep)
        devices.synchronize()
        got = [model[spec.name].array for spec in SPECS]
        equal &= all(map(np.array_equal, got, content(number)))
    return equal, reserved(list(model.values()))


def reserved(tensors: Sequence[Tensor]) -> int:
    """The bytes that this process reserves besides ``tensors``, after it has returned what it can."""
    devices.empty_cache()
    return GPU.process.reserved - sum(int(each.array.nbytes) for each in tensors)


def both(gpu: Gpu, action: Callable[[int], Any]) -> list[Any]:
    """What the action of each of two ranks returns or raises."""
    return gpu.processes(lambda: action(0), lambda: action(1))


def without_vllms_groups() -> None:
    """Make vLLM one of release 0.4."""
    del sys.modules["vllm.distributed.utils"].StatelessProcessGroup
    del sys.modules["vllm.distributed.device_communicators.pynccl_wrapper"]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    ("backend", "older", "kind"),
    [
        ("nccl", False, nccl.NcclGroup),
        ("nccl", True, nccl.TorchNcclGroup),
        ("auto", False, nccl.NcclGroup),
        ("auto", True, nccl.TorchNcclGroup),
    ],
)
def test_every_byte_arrives_over_nccl(cuda: Gpu, backend: str, older: bool, kind: type, keep: bool) -> None:
    if older:
        without_vllms_groups()

    def run(rank: int) -> Any:
        group = sync.create_group(HOST, PORT, rank, 2, devices.current_device(), backend)
        assert group.__class__ is kind
        assert bool(group.selection) == (backend == "auto")
        result = load_all(group, keep) if rank else train_and_send(group)
        group.close()
        return result

    assert both(cuda, run) == [0, (True, 0)]
    assert [each.aborts for each in cuda.communicators] == [1, 1]
    if older:
        assert (cuda.options["backend"], cuda.options["timeout"]) == ("nccl", timedelta(seconds=40))


@pytest.mark.parametrize("keep", [False, True])
def test_every_byte_is_read_on_the_same_gpu_and_no_memory_stays(
    cuda: Gpu, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    """The worker closes the trainer's memory only after the trainer has freed it."""
    freed, closed = threading.Semaphore(0), threading.Semaphore(0)
    free, close = same_gpu.SentMemory.release, same_gpu.OpenedMemory.release

    def free_first(memory: same_gpu.SentMemory) -> None:
        free(memory)
        freed.release()

    def close_later(memory: same_gpu.OpenedMemory) -> None:
        assert freed.acquire(timeout=SECONDS)
        close(memory)
        closed.release()

    monkeypatch.setattr(same_gpu.SentMemory, "release", free_first)
    monkeypatch.setattr(same_gpu.OpenedMemory, "release", close_later)
    offer = same_gpu.Offer("GPU-1", "rank 0")

    def until() -> None:
        assert all(closed.acquire(timeout=SECONDS) for _ in range(SYNCS))

    def send() -> int:
        devices.set_device(3)  # the worker sees one GPU
        return train_and_send(offer.accept(), until)

    sent, loaded = cuda.processes(
        send, lambda: load_all(same_gpu.join({"GPU-1": offer.address}, "GPU-1", "rank 0"), keep)
    )
    assert (sent, loaded) == (0, (True, 0))


@pytest.mark.usefixtures("cuda")
def test_gloo_packs_into_pinned_memory_and_waits_for_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["torch.distributed"], "ProcessGroupGloo", MagicMock(), raising=False)
    members = MagicMock(rank=0, world=2, describe=str, addresses=["a", "b"], address="a")
    members.exchange.return_value = ["0", "0"]
    monkeypatch.setattr(gloo, "share_node_buffers", lambda _: ([0, 1], None, None))
    monkeypatch.setattr(gloo, "gloo_device", lambda _: None)
    group = gloo.GlooGroup(members)
    start = MagicMock()
    monkeypatch.setattr(group, "start", start)
    weights = [tensor(each, "cuda:0") for each in content(0)]
    sender = BucketSender(group, in_place=True)
    sender.send(0, BUCKETS[0], [weights[span.index] for span in BUCKETS[0].spans])
    (packed, *_), _ = start.call_args.args
    assert packed.pinned
    assert not packed.is_cuda
    assert np.array_equal(packed.array[: 4 * SIZES[0]].view(np.float32), content(0)[0])


@ANY_ORDER
def test_a_rank_whose_address_is_not_its_nodes_is_named_for_all(
    cuda: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listen(address: str) -> None:
        raise RuntimeError(f"Cannot resolve {address} to a (local) address")

    monkeypatch.setattr(sys.modules["torch.distributed"], "ProcessGroupGloo", MagicMock(), raising=False)
    monkeypatch.setattr(gloo, "share_node_buffers", lambda _: ([0], None, None))
    monkeypatch.setattr(gloo, "gloo_device", listen)
    (error,) = cuda.processes(lambda: sync.create_group(HOST, PORT, 0, 1, 0, "gloo"))
    assert isinstance(error, sync.SyncError)
    assert str(error).startswith(
        "weight sync, rank 0 (the trainer) on 127.0.0.1, gloo, listening at 127.0.0.1: Cannot resolve "
        "127.0.0.1 to a (local) address; ranks must reach each other at their nodes' own addresses"
    )


@pytest.fixture
def hanging(cuda: Gpu, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """The fake GPU, on which no broadcast of NCCL ends, and a short deadline."""
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, DEADLINE)
    cuda.nccl.hangs = True
    return cuda


@ANY_ORDER
def test_a_broadcast_that_does_not_end_is_aborted_and_the_group_refuses_more(hanging: Gpu) -> None:
    def run(rank: int) -> tuple[str, str]:
        group: Any = sync.create_group(HOST, PORT, rank, 2, rank, "nccl")
        part = empty(8, np.dtype("uint8"), f"cuda:{rank}")
        with pytest.raises(sync.SyncError) as late, group.syncing():
            group.start([part], "bucket 1 of 9").finish()
        with pytest.raises(sync.SyncError) as again:
            group.start([part], "bucket 2 of 9")
        return str(late.value), str(again.value)

    ended = both(hanging, run)
    assert any("stream has not finished" in late for late, _ in ended)  # the other rank may be told so
    for rank, (late, again) in enumerate(ended):
        assert late.startswith(f"weight sync, rank {rank}")
        assert "nccl, bucket 1 of 9" in late
        assert "would load garbage" in again
    assert [each.aborts for each in hanging.communicators] == [1, 1]


@ANY_ORDER
def test_an_error_that_a_broadcast_returns_is_diagnosed_on_every_rank(hanging: Gpu) -> None:
    def run(rank: int) -> None:
        group: Any = sync.create_group(HOST, PORT, rank, 2, rank, "nccl")
        if rank:
            refused = RuntimeError("NCCL error: unhandled cuda error\nin a call")
            group._communicator.broadcast = MagicMock(side_effect=refused)
        with group.syncing():
            group.start([empty(8, np.dtype("uint8"), f"cuda:{rank}")], "bucket 1 of 9").finish()

    errors = both(hanging, run)
    for rank, error in enumerate(errors):
        assert isinstance(error, sync.SyncError)
        assert str(error).startswith(f"weight sync, rank {rank}")
        assert "rank 1 on 127.0.0.1: nccl, bucket 1 of 9: NCCL error: unhandled cuda error" in str(error)
    assert [each.aborts for each in hanging.communicators] == [1, 1]


@ANY_ORDER
def test_a_rank_that_fails_first_ends_the_broadcast_of_the_others(hanging: Gpu) -> None:
    def run(rank: int) -> None:
        group = sync.create_group(HOST, PORT, rank, 2, rank, "nccl")
        with group.syncing():
            if rank:
                raise ZeroDivisionError("the loader")
            group.start([empty(8, np.dtype("uint8"), "cuda:0")], "a bucket").finish()

    sender, loader = map(str, both(hanging, run))
    assert "rank 1 on 127.0.0.1: ZeroDivisionError: the loader" in sender
    assert "another rank failed first" in sender
    assert loader == "the loader"


@ANY_ORDER
def test_a_lost_engine_aborts_the_broadcast_for_which_the_gpu_waits(hanging: Gpu) -> None:
    """DeepSpeed's next gather waits for all work of the GPU, without a deadline."""
    lost = MagicMock(side_effect=PeerError("engine 0 is dead"))

    def run(rank: int) -> None:
        group = sync.create_group(HOST, PORT, rank, 2, rank, "nccl")
        if rank:
            group.close()
            return
        with pytest.raises(PeerError, match="engine 0 is dead"), group.syncing(lost):
            group.start([empty(8, np.dtype("uint8"), "cuda:0")], "a bucket").finish()
        devices.synchronize()

    assert both(hanging, run) == [None, None]
    assert [each.aborts for each in hanging.communicators] == [1, 1]


@ANY_ORDER
def test_a_rank_that_does_not_join_nccl_is_an_error_within_the_deadline(
    cuda: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, DEADLINE)
    cuda.nccl.absent = {1}
    start = time.monotonic()
    for error in both(cuda, lambda rank: sync.create_group(HOST, PORT, rank, 2, rank, "nccl")):
        assert isinstance(error, sync.SyncError)
        assert "nccl, joining the communicator" in str(error)
    assert time.monotonic() - start < SECONDS


@ANY_ORDER
def test_a_constructor_of_nccl_that_does_not_end_is_aborted_at_the_deadline(
    cuda: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, DEADLINE)
    cuda.nccl.hangs_in_constructor = True
    start = time.monotonic()
    for error in both(cuda, lambda rank: sync.create_group(HOST, PORT, rank, 2, rank, "nccl")):
        assert isinstance(error, sync.SyncError)
        assert "nccl, joining the communicator" in str(error)
    assert time.monotonic() - start < SECONDS
    assert [each.aborts for each in cuda.communicators] == [1, 1]


@ANY_ORDER
@pytest.mark.parametrize("older", [False, True])
def test_an_error_of_nccl_while_a_rank_joins_is_every_ranks_reason(
    cuda: Gpu, monkeypatch: pytest.MonkeyPatch, older: bool
) -> None:
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, DEADLINE)
    if older:
        without_vllms_groups()
    cuda.nccl.failing = {1: RuntimeError("NCCL error: unhandled system error\nof a socket")}
    waiting, failed = map(str, both(cuda, lambda rank: sync.create_group(HOST, PORT, rank, 2, rank, "nccl")))
    cause = "nccl, joining the communicator: NCCL error: unhandled system error"
    assert failed == (
        f"weight sync, rank 1 on 127.0.0.1, {cause}; see NCCL's own reason with NCCL_DEBUG=INFO, or use "
        "--vllm.sync_backend gloo"
    )
    assert f"nccl, joining the communicator: rank 1 on 127.0.0.1: {cause}" in waiting


@ANY_ORDER
def test_a_missing_nccl_is_an_error_unless_the_rank_is_alone(cuda: Gpu) -> None:
    cuda.nccl.missing = "libnccl.so.2: cannot open"
    errors = both(cuda, lambda rank: sync.create_group(HOST, PORT, rank, 2, rank, "nccl"))
    assert all("engines would load garbage" in str(error) for error in errors)
    (alone,) = cuda.processes(lambda: sync.create_group(HOST, PORT + 1, 0, 1, 0, "nccl").name)
    assert alone == "nccl"


MISSING = {"missing": "libnccl.so.2: cannot open"}
LATE = "no broadcast over NCCL finished within 1 s"


@ANY_ORDER
@pytest.mark.parametrize(
    ("fault", "of_nccl", "reason", "aborted"),
    [
        ("", MISSING, "cannot use NCCL: libnccl.so.2: cannot open", []),
        ("older vLLM", MISSING, "cannot use NCCL: torch was built without it", []),
        ("versions", {}, "cannot use NCCL: weight sync over nccl is known not to work here: ", []),
        ("one GPU", {}, "share GPU 00000000-aaaa, which NCCL refuses", []),
        ("no GPU", {}, "rank 0 (the trainer) on 127.0.0.1 has no GPU", []),
        ("", {"hangs": True}, LATE, [1, 1]),
        ("", {"hangs_in_constructor": True}, LATE, [1, 1]),
        ("", {"corrupts": True}, "rank 1 on 127.0.0.1: a test broadcast delivered different bytes", [1, 1]),
        ("", {"absent": {1}}, LATE, [1, 1]),
    ],
)
def test_auto_uses_gloo_on_every_rank_if_nccl_fails_on_one(
    cuda: Gpu,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    of_nccl: dict[str, Any],
    reason: str,
    aborted: list[int],
) -> None:
    logged: list[str] = []
    if fault == "versions":
        versions = {"openrlhf": "0.5.1", "vllm": "0.4.3"}.items()
        bad = [SimpleNamespace(name=name, version=version) for name, version in versions]
        monkeypatch.setattr(backend_selection, "distributions", lambda: bad)
    if fault == "older vLLM":
        without_vllms_groups()
    if fault in ("one GPU", "no GPU"):
        cuda.uuids[:] = [cuda.uuids[0]] * 2 if fault == "one GPU" else []
    if reason == LATE:
        monkeypatch.setattr(backend_selection, "PROBE_SECONDS", 1.0)
    monkeypatch.setattr(backend_selection, "GlooGroup", lambda members: SimpleNamespace(rank=members.rank))
    monkeypatch.setattr(run_log, "info", logged.append)
    for name, value in of_nccl.items():
        setattr(cuda.nccl, name, value)
    groups = both(cuda, lambda rank: sync.create_group(HOST, PORT, rank, 2, rank, "auto"))
    assert [group.rank for group in groups] == [0, 1]
    assert all(reason in group.selection for group in groups)
    assert all("auto selects gloo" in line and reason in line for line in logged)
    assert len(logged) == 2
    cuda.nccl.ended.set()  # a call to join that was waiting returns, and its group is closed
    end = time.monotonic() + 10
    while [each.aborts for each in cuda.communicators] != aborted:
        assert time.monotonic() < end, [each.aborts for each in cuda.communicators]
        time.sleep(0.01)
