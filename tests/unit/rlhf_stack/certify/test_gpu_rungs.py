"""Rungs of certify on GPUs: what each measures there, and that each finds what it is for."""

import dataclasses
import io
import json
import os
import sys
from collections.abc import Callable
from contextlib import contextmanager, redirect_stdout
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from rlhf_stack.accelerator import devices, visible_devices
from rlhf_stack.certify import (
    attention,
    climb,
    collectives,
    engines,
    ipc,
    memory_peaks,
    on_cluster,
    streams,
    weight_sync,
)
from rlhf_stack.certify.ladder import LADDER, NotClimbedError, Place
from rlhf_stack.certify.model import FAILED, PASSED, Record
from rlhf_stack.cli.main import main
from rlhf_stack.compat import ray_private
from rlhf_stack.config import env_vars
from rlhf_stack.diagnostics.network_check import probe

from tests.unit import fake_cuda
from tests.unit.fake_cuda import Gpu, Stream, empty, tensor

PLACE = Place("", "/nowhere", small=False)
(MEMORY,) = (step for step in LADDER if step.name == "memory")
BYTES = np.dtype("uint8")


@pytest.fixture(autouse=True)
def image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.ACCELERATOR, "cuda")
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "")  # which the rung of streams sets, restored after the test


def nothing(_: pytest.MonkeyPatch) -> None:
    """NCCL and CUDA as they should be."""


def unordered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "wait_stream", lambda *_: None)
    monkeypatch.setattr(fake_cuda, "HERTZ", 1e8)  # so that a busy machine sends before the buffer is filled


def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_vars, "sync_timeout", lambda: 100.0)
    monkeypatch.setattr(streams, "CYCLES", 1 << 29)


@pytest.mark.parametrize("cuda", ["oldest"], indirect=True)
@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (nothing, ""),
        (unordered, "NCCL sent the buffer before the default stream had filled it"),
        (endless, "a broadcast that is late by half a minute was not noticed"),
    ],
)
@pytest.mark.usefixtures("cuda")
def test_the_rung_of_streams_finds_what_is_not_ordered_or_late(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None], problem: str
) -> None:
    monkeypatch.setattr(streams, "SECONDS", 2.0)
    fault(monkeypatch)
    assert streams.climb(PLACE).problem == problem


def test_memory_is_what_stays_and_the_peak_since_the_call(cuda: Gpu) -> None:
    held = [empty(50, BYTES, "cuda:0"), empty(1000, BYTES, "cuda:0")]
    del held[1]  # the peak before the call does not count

    def call() -> Any:
        temporary = empty(300, BYTES, "cuda:0")
        kept = empty(100, BYTES, "cuda:0")
        return kept.copy_(temporary[:100])

    assert memory_peaks.profiled(call) == (100, 400)
    assert not any(stream.queue for stream in cuda.process.streams), "the GPU had ended"


def test_another_process_opens_a_handle_on_the_gpu_of_this_one(
    cuda: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], input: bytes, **_: Any) -> Any:
        output = io.StringIO()
        monkeypatch.setattr(sys, "argv", command[2:])
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(input)))
        with redirect_stdout(output):
            assert cuda.processes(ipc.main) == [None]
        return SimpleNamespace(returncode=0, stdout=output.getvalue().encode())

    held = tensor(np.arange(9, dtype=BYTES), "cuda:2")
    cuda.synchronize()
    torch = SimpleNamespace(manual_seed=id, randint=lambda *_, **__: MagicMock(to=lambda _: held), int16=None)
    monkeypatch.setattr(ipc, "torch", torch)
    monkeypatch.setattr(ipc, "checksum", lambda found: f"{found.array.sum()}-on-{found.device.index}")
    monkeypatch.setattr(ipc, "subprocess", SimpleNamespace(run=run))
    cuda.process.index = 2
    found = ipc.climb(PLACE)
    assert (found.problem, found.details["checksum"]) == ("", "36-on-2")


def compute(_: pytest.MonkeyPatch) -> None:
    on_cluster.Hand().run(id, 0)


def reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "join_group", MagicMock(side_effect=ConnectionError))
    with pytest.raises(ConnectionError):
        collectives.Member().all_reduce(("10.0.0.1", 7), 1, 2, 8)


def prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sync, "parameters", lambda _: {})
    weight_sync.Rank().prepare(True, "gloo", True)


def check_network(_: pytest.MonkeyPatch) -> None:
    probe.Probe("10.0.0.1", "nccl", 1.0)


def test_a_rank_that_receives_sees_its_own_gpu_alone(cuda: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an engine of one GPU: RCCL of ROCm 7.2 fails between it and a trainer that sees all."""
    monkeypatch.setitem(sys.modules, "ray", MagicMock(get_gpu_ids=lambda: ["3"]))
    monkeypatch.setenv(visible_devices.CUDA, "0,1,2,3")
    monkeypatch.setattr(weight_sync, "parameters", lambda _: {})
    weight_sync.Rank().prepare(False, "gloo", True)
    assert os.environ[visible_devices.CUDA] == "3"


@pytest.mark.parametrize("begin", [compute, reduce, prepare, check_network])
@pytest.mark.parametrize(("assigned", "current"), [(["3"], 3), ([], 1)])
def test_an_actor_computes_on_the_gpu_that_ray_assigned_to_it_though_it_sees_all(
    cuda: Gpu,
    monkeypatch: pytest.MonkeyPatch,
    begin: Callable[[pytest.MonkeyPatch], None],
    assigned: list[str],
    current: int,
) -> None:
    """As with a NOSET variable of Ray, which the ROCm images set; an actor without a GPU selects none."""
    monkeypatch.setitem(sys.modules, "ray", MagicMock(get_gpu_ids=lambda: assigned))
    monkeypatch.setattr(ray_private, "visible_devices_variable", lambda: visible_devices.CUDA)
    for name in devices.VISIBLE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name in (env_vars.SYNC_SPARSE, env_vars.SYNC_SOURCES):
        monkeypatch.setenv(name, "")  # which a probe sets, restored after the test
    cuda.process.index = 1
    begin(monkeypatch)
    assert cuda.process.index == current


@dataclasses.dataclass
class Element:
    """A tensor with one element."""

    value: Any

    def float(self) -> "Element":
        return self

    def __sub__(self, other: "Element") -> "Element":
        return Element(self.value - other.value)

    def abs(self) -> "Element":
        return Element(max(self.value, -self.value))

    def max(self) -> Any:
        return self.value


@pytest.mark.parametrize("wrong", ["nan", "inf"])
def test_a_result_that_is_no_number_fails_the_rung_of_attention_and_not_its_json(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "torch", MagicMock(bfloat16="torch.bfloat16"))
    monkeypatch.setattr(devices, "torch_device", lambda: SimpleNamespace(type="cuda"))
    monkeypatch.setattr(attention, "_packed", lambda *_: None)
    right = [Element(1.0)] * len(attention.PARTS)
    results = [right, [right[0], Element(float(wrong)), *right[2:]], *[right] * 4]
    monkeypatch.setattr(attention, "_with_gradients", MagicMock(side_effect=results))
    (step,) = (step for step in LADDER if step.name == "attention")
    record = climb.attempt(step, PLACE)
    assert record.state == FAILED
    assert record.reason == f"equal heads: the query's gradient differs by {wrong}"
    assert [one.value for one in record.measurements] == [0.0] * 11
    assert json.loads(json.dumps(dataclasses.asdict(record), allow_nan=False))


@pytest.mark.parametrize(("freed", "problem"), [(600, ""), (0, "no GPU memory was freed")])
def test_sleep_must_free_memory_of_the_gpu(
    cuda: Gpu, monkeypatch: pytest.MonkeyPatch, freed: int, problem: str
) -> None:
    weights = empty(800, BYTES, "cuda:0")

    class Engine:
        def wake_up(self) -> None: ...

        def sleep(self) -> None:
            cuda.process.allocated -= freed

        def __ray_call__(self, action: Callable[[object], int]) -> int:
            return action(self)

    @contextmanager
    def started(*_: Any, **__: Any) -> Any:
        yield [Engine()], ["10.0.0.1"]

    monkeypatch.setattr(engines, "version", lambda _: "0.11.2")
    monkeypatch.setattr(engines, "_engines", started)
    monkeypatch.setattr(engines, "_call", lambda method, *arguments: method(*arguments))
    monkeypatch.setattr(engines, "_generated", lambda _: [1, 2])
    found = engines.sleep(PLACE)
    assert found.problem == problem
    assert [measured.value for measured in found.measurements] == [freed / 1e9]
    assert weights.numel() == 800


@pytest.mark.parametrize(("phases", "waited"), [((engines.BEFORE,), 0), (engines.PHASES, 1)])
def test_throughput_says_whether_a_rank_waited(
    monkeypatch: pytest.MonkeyPatch, phases: tuple[str, ...], waited: int
) -> None:
    @contextmanager
    def started(*_: Any) -> Any:
        yield [object()], ["10.0.0.1"]

    monkeypatch.setattr(engines, "version", lambda _: "0.11.2")
    monkeypatch.setattr(engines, "_engines", started)
    taken = [{"phase": phase, "start": 0.0, "seconds": [2.0]} for phase in phases]
    monkeypatch.setattr(engines, "rounds", lambda *_: taken)
    measured = {one.name: one.value for one in engines.throughput(PLACE).measurements}
    rate = engines.REQUESTS * engines.TOKENS / 2
    assert measured == {f"engine 0, {phase}": rate for phase in phases} | {"ranks that waited": waited}


def test_a_rank_uses_the_gpu_of_its_engine(cuda: Gpu) -> None:
    engines.Rank().share(cuda.uuids[3], None)
    assert cuda.process.index == 3


@pytest.mark.parametrize(
    "join",
    [
        lambda where: engines.Rank().join(where, 1, 2),
        lambda where: collectives.Member().all_reduce(where, 1, 2, 8),
    ],
    ids=["engines", "collectives"],
)
@pytest.mark.usefixtures("cuda")
def test_ranks_join_over_ipv6_too(
    monkeypatch: pytest.MonkeyPatch, join: Callable[[tuple[str, int]], None]
) -> None:
    joined = MagicMock(side_effect=ConnectionError)
    monkeypatch.setitem(sys.modules, "ray", MagicMock(get_gpu_ids=list))
    monkeypatch.setattr(sys.modules["torch"], "distributed", SimpleNamespace(init_process_group=joined))
    for address, expected in (("fd00::1", "tcp://[fd00::1]:7"), ("10.0.0.1", "tcp://10.0.0.1:7")):
        with pytest.raises(ConnectionError):
            join((address, 7))
        assert joined.call_args.kwargs["init_method"] == expected


def test_an_engine_takes_a_part_of_the_memory_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = MagicMock()
    for name in ("openrlhf", "openrlhf.trainer"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    monkeypatch.setitem(sys.modules, "openrlhf.trainer.ray", MagicMock(vllm_engine=upstream))
    monkeypatch.setattr("rlhf_stack.engine.startup.wait_for_engine_startup", lambda _: None)
    engines.create("model", 1)
    assert upstream.create_vllm_engines.call_args.kwargs["gpu_memory_utilization"] == 0.3


def test_weights_are_sent_over_both_backends() -> None:
    assert weight_sync.backends() == ("nccl", "gloo")


def test_a_cluster_of_its_own_has_the_gpus_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's Cluster gives a node no GPU by default, whatever the machine has."""
    gpus = SimpleNamespace(device_count=lambda: 3)
    monkeypatch.setattr(on_cluster, "torch", SimpleNamespace(cuda=gpus))
    cluster = MagicMock()
    monkeypatch.setitem(sys.modules, "ray", MagicMock())
    monkeypatch.setitem(sys.modules, "ray.cluster_utils", MagicMock(Cluster=lambda: cluster))
    with on_cluster._own(()):
        cluster.add_node.assert_called_once()
    assert cluster.add_node.call_args.kwargs["num_gpus"] == 3


@pytest.mark.parametrize(
    ("selected", "problem"),
    [
        ([("nccl", "a broadcast reached all ranks")] * 2, ""),
        ([("gloo", "rank 1 has no GPU")] * 2, "auto selects gloo, and nccl works: rank 1 has no GPU"),
        ([("nccl", ""), ("gloo", "it is late")], "auto selects nccl on rank 0 on a, gloo on rank 1 on b"),
    ],
)
def test_auto_is_synced_too_and_must_select_the_fastest(
    monkeypatch: pytest.MonkeyPatch, selected: list[tuple[str, str]], problem: str
) -> None:
    names = ["rank 0 on a", "rank 1 on b"]
    joined: list[str] = []

    class Joined:
        def __init__(self, rank: int, backend: str) -> None:
            made = selected[rank] if backend == "auto" else (backend, "")
            self.selection = SimpleNamespace(remote=lambda: made)
            self.sync = SimpleNamespace(remote=lambda: (0.5, 1_000_000_000, list[str]()))

    @contextmanager
    def ranks(_: Place, backend: str, __: float) -> Any:
        joined.append(backend)
        yield [Joined(rank, backend) for rank in range(2)], names

    monkeypatch.setattr(weight_sync, "_joined", ranks)
    monkeypatch.setattr(weight_sync, "answers", lambda calls, *_: calls)
    found = weight_sync.climb(PLACE)
    assert joined == ["nccl", "gloo", "auto"]
    assert found.problem == problem
    assert (found.details["auto"]["selected"], found.details["auto"]["why"]) == selected[0]
    assert "why" not in found.details["gloo"]


NAMED = RuntimeError("weight sync, rank 1: rank 2 on c does not answer: dead, stopped or cut off")
OTHER = RuntimeError("weight sync, rank 1: rank 0 (the trainer) on a does not answer")
UNTIL = "no answer within 32 s"


@pytest.mark.parametrize(
    ("trainer", "worker", "problem"),
    [
        (NAMED, NAMED, ""),
        ("sent", NAMED, ""),
        ("sent", "loaded", "the sync ended as if nothing had happened"),
        ("sent", OTHER, f"rank 1 on b: RuntimeError: {OTHER}"),
        (TimeoutError(), NAMED, f"rank 0 (the trainer) on a: {UNTIL}; rank 1 on b: RuntimeError: {NAMED}"),
        ("sent", TimeoutError(), f"rank 1 on b: {UNTIL}"),
    ],
)
def test_every_rank_that_remains_may_name_the_lost_one(
    monkeypatch: pytest.MonkeyPatch, trainer: object, worker: object, problem: str
) -> None:
    """The trainer of a chain or a ring may have sent all before the loss has reached it."""
    names = ["rank 0 (the trainer) on a", "rank 1 on b", "rank 2 on c"]

    def get(call: object, timeout: float) -> object:
        if isinstance(call, Exception):
            raise call
        return call

    @contextmanager
    def joined(*_: Any) -> Any:
        ranks = [MagicMock() for _ in names]
        for rank, end in zip(ranks, (trainer, worker, None), strict=True):
            rank.sync.remote.side_effect = iter(["loaded", end]).__next__
        yield ranks, names

    errors = SimpleNamespace(GetTimeoutError=TimeoutError, RayError=RuntimeError)
    monkeypatch.setitem(sys.modules, "ray", MagicMock(get=get, exceptions=errors))
    monkeypatch.setattr(weight_sync, "_joined", joined)
    found = weight_sync.lost_rank(PLACE)
    expected = f"the error does not name rank 2 on c in time: {problem}"
    assert found.problem == (f"nccl: {expected}; gloo: {expected}" if problem else "")


METHODS = "run", "prepare", "join"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two nodes with three GPUs; return the list of the nodes of actors, which is filled later."""
    addresses: list[str] = []

    @contextmanager
    def nodes(_: Place) -> Any:
        yield [SimpleNamespace(address="a", total_gpus=2), SimpleNamespace(address="b", total_gpus=1)]

    @contextmanager
    def actors(_: Any, where: list[str]) -> Any:
        addresses.extend(where)
        yield [SimpleNamespace(__ray_call__=MagicMock(), **{m: MagicMock() for m in METHODS}) for _ in where]

    for module in (on_cluster, weight_sync):
        monkeypatch.setattr(module, "nodes_with_gpus", nodes)
        monkeypatch.setattr(module, "actors", actors)
    return addresses


def test_a_rung_for_one_gpu_is_climbed_on_each(cluster: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record("memory", PASSED, "", 1.0)
    monkeypatch.setattr(on_cluster, "answers", lambda calls, *_: [record] * len(calls))
    assert set(climb.on_every_gpu(MEMORY, PLACE).details) == {"GPU 0 on a", "GPU 1 on a", "GPU 2 on b"}
    assert cluster == ["a", "a", "b"]


@pytest.mark.usefixtures("cluster")
def test_a_gpu_that_does_not_answer_is_named_before_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(_: object, names: list[str], seconds: float) -> None:
        assert seconds < MEMORY.seconds
        raise RuntimeError(f"{names[2]}: no answer")

    monkeypatch.setattr(on_cluster, "answers", answers)
    record = climb.recorded(MEMORY, lambda: climb.on_every_gpu(MEMORY, PLACE))
    assert (record.state, record.reason) == (FAILED, "RuntimeError: GPU 2 on b: no answer")


@pytest.mark.usefixtures("cluster")
def test_ranks_are_prepared_before_they_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = MagicMock()
    monkeypatch.setattr(weight_sync, "answers", answers)
    monkeypatch.setattr(weight_sync, "ray", MagicMock(get=lambda *_, **__: ("a", 7)))
    with weight_sync._joined(PLACE, "gloo", 12.0) as (ranks, _):
        prepared, joined = (call.args[0] for call in answers.call_args_list)
    assert prepared == [rank.prepare.remote.return_value for rank in ranks]
    assert joined == [rank.join.remote.return_value for rank in ranks]
    assert [rank.prepare.remote.call_args.args[0] for rank in ranks] == [True, False, False]
    assert [rank.join.remote.call_args.args[:4] for rank in ranks] == [("a", 7, rank, 3) for rank in range(3)]


def test_fake_gpus_are_refused_in_an_image_for_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", "--fake-gpus", "2"]) == 2
    assert "this image is for GPUs" in capsys.readouterr().err


@pytest.mark.usefixtures("cuda")
def test_streams_are_not_climbed_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.ACCELERATOR, "cpu")
    with pytest.raises(NotClimbedError, match="need a GPU"):
        streams.climb(PLACE)
    assert engines.free_memory(None) == 0
