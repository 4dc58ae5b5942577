"""Parts of the sync that need no torch; groups of real processes are in tests/cluster."""

import sys
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
from rlhf_stack import sync
from rlhf_stack.cluster import actor_registry
from rlhf_stack.config import env_vars
from rlhf_stack.sync import actor_waits, backend, nccl


class GetTimeoutError(Exception):
    """A substitute for ray.exceptions.GetTimeoutError."""


class Dead(Exception):
    """A substitute for ray.exceptions.RayActorError."""

    actor_init_failed = False


class Failed(Exception):
    """A substitute for ray.exceptions.RayTaskError."""


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    fake = MagicMock()
    fake.exceptions.GetTimeoutError = GetTimeoutError
    fake.exceptions.RayActorError, fake.exceptions.RayTaskError = Dead, Failed
    fake.exceptions.ActorUnavailableError = ()
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """Replace vLLM's communicator and rendezvous, and torch by one built for CUDA."""
    fake = MagicMock()
    names = ["vllm", "vllm.distributed", "vllm.distributed.device_communicators"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, f"{names[-1]}.pynccl", fake)
    monkeypatch.setitem(sys.modules, "vllm.distributed.utils", fake)
    monkeypatch.setattr(sys.modules["vllm.distributed"], "utils", fake, raising=False)
    torch = MagicMock()
    torch.version.cuda = "12.8"
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.distributed", torch.distributed)
    monkeypatch.setattr(backend, "Members", lambda _host, _port, rank, world: members(rank, world))
    return fake


def members(rank: int, world: int) -> MagicMock:
    """Return ranks after their rendezvous."""
    return MagicMock(rank=rank, world=world, describe=lambda one: f"rank {one} on 10.0.0.1")


@pytest.mark.parametrize("name", ["nccl", "gloo", "auto"])
def test_backends_that_work_are_accepted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.ACCELERATOR, "cpu")
    sync.check_backend(name, with_ray=False)


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(sync.SyncError, match=r"weight sync backend mpi: expected one of nccl, gloo, auto"):
        sync.check_backend("mpi", with_ray=False)


def test_gloo_by_ray_is_refused_with_the_reason() -> None:
    with pytest.raises(sync.SyncError, match=r"leave out --vllm\.sync_with_ray"):
        sync.check_backend("gloo", with_ray=True)


def test_nccl_on_a_gpu_is_upstreams_communicator(vllm: MagicMock) -> None:
    vllm.PyNcclCommunicator.return_value.disabled = False
    group = sync.create_group("10.0.0.1", 1234, 2, 3, 0, "nccl")
    assert vllm.StatelessProcessGroup.call_args.kwargs["rank"] == 2
    assert vllm.StatelessProcessGroup.call_args.kwargs["world_size"] == 3
    vllm.PyNcclCommunicator.assert_called_once_with(vllm.StatelessProcessGroup.return_value, device=0)
    tensor, stream = MagicMock(), MagicMock()
    group.broadcast(tensor, src=0, stream=stream)
    vllm.PyNcclCommunicator.return_value.broadcast.assert_called_once_with(tensor, src=0, stream=stream)


def test_nccl_sends_the_parts_of_a_bucket_that_have_bytes(vllm: MagicMock) -> None:
    communicator = vllm.PyNcclCommunicator.return_value
    communicator.disabled = False
    group = sync.create_group("10.0.0.1", 1234, 0, 3, 0, "nccl")
    parts = [MagicMock(), MagicMock(), MagicMock()]
    for part, size in zip(parts, (7, 0, 9), strict=True):
        part.numel.return_value = size
    group.start(parts, "bucket 1")
    assert [call.args[0] for call in communicator.broadcast.call_args_list] == [parts[0], parts[2]]


def test_a_broadcast_of_nccl_that_does_not_end_is_aborted_with_an_error(
    vllm: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "0.2")
    ranks = members(0, 3)
    ranks.failure.return_value = sync.SyncError("rank 2 does not answer")
    ranks.wait_for_transfer.side_effect = lambda done: [None for _ in iter(lambda: done(0.01), True)]
    monkeypatch.setattr(backend, "Members", lambda *_: ranks)
    communicator = vllm.PyNcclCommunicator.return_value
    communicator.disabled = False
    group = sync.create_group("10.0.0.1", 1234, 0, 3, 0, "nccl")
    group._stream.record_event.return_value.query.return_value = False  # type: ignore[attr-defined]
    transfer = group.start([], "bucket 1")
    with pytest.raises(sync.SyncError, match="rank 2 does not answer"):
        transfer.finish()
    what, error = ranks.failure.call_args.args
    assert what == "nccl, bucket 1"
    assert "stream" in str(error)
    communicator.destroy.assert_called_once_with()


def test_nccl_where_vllm_has_no_communicator_for_others_is_torchs(
    vllm: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    del vllm.StatelessProcessGroup
    upstream = MagicMock()
    for name in ("openrlhf", "openrlhf.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "openrlhf.utils.distributed_util", upstream)
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "7")
    group = sync.create_group("10.0.0.1", 1234, 2, 3, 0, "nccl")
    assert group.__class__ is nccl.TorchNcclGroup
    options = upstream.init_process_group.call_args.kwargs
    assert options["backend"] == "nccl"
    assert options["timeout"] == timedelta(seconds=7)
    assert (options["rank"], options["world_size"], options["group_name"]) == (2, 3, "openrlhf")


def test_a_disabled_communicator_is_an_error(vllm: MagicMock) -> None:
    vllm.PyNcclCommunicator.return_value.disabled = True
    with pytest.raises(sync.SyncError, match="engines would load garbage"):
        sync.create_group("10.0.0.1", 1234, 1, 3, 0, "nccl")


def test_a_wait_returns_what_ray_returns(ray: MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "7")
    ray.get.return_value = ["a", "b"]
    assert sync.wait_for_engine_results(["first", "second"], "something") == ["a", "b"]
    ray.get.assert_called_once_with(["first", "second"], timeout=7.0)


def test_a_wait_past_its_deadline_names_the_operation_and_the_engine(
    ray: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "7")
    monkeypatch.setattr(actor_registry, "describe_callee", {"second": "engine 1 on node-b"}.__getitem__)
    ray.get.side_effect = GetTimeoutError
    ray.wait.return_value = (["first"], ["second"])
    expected = (
        r"waited 7 s for loading w; engines \[1\] of 2 did not answer \(deadline: RLHF_STACK_SYNC_TIMEOUT\): "
        r"engine 1 on node-b$"
    )
    with pytest.raises(sync.SyncError, match=expected):
        sync.wait_for_engine_results(["first", "second"], "loading w")


def engine(answer: str) -> SimpleNamespace:
    return SimpleNamespace(__ray_ready__=SimpleNamespace(remote=lambda: answer))


def test_the_start_of_engines_is_awaited(ray: MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.ENGINE_TIMEOUT, "9")
    sync.wait_for_engine_start([engine("up")])
    ray.get.assert_called_once_with(["up"], timeout=9.0)


def test_a_dead_engines_own_error_is_raised(ray: MagicMock) -> None:
    ray.get.side_effect = RuntimeError("the engine's own error")
    with pytest.raises(RuntimeError, match="the engine's own error"):
        sync.wait_for_engine_start([engine("dead")])


class Engine:
    """An engine actor with a sequence of answers to queries for its sync error."""

    def __init__(self, *answers: object) -> None:
        self._answers = list(answers)
        self.sync_error = SimpleNamespace(remote=lambda: ("answer", self._answers.pop(0)))


def simulated(ray: MagicMock, ready: dict[str, int]) -> None:
    """Simulate a Ray in which a trainer rank is ready after ``ready`` waits, and engines answer at once."""
    remaining = dict(ready)

    def wait(references: list[object], **_: object) -> tuple[list[object], list[object]]:
        done = []
        for reference in references:
            if isinstance(reference, str):
                remaining[reference] -= 1
            if not isinstance(reference, str) or remaining[reference] <= 0:
                done.append(reference)
        return done, [reference for reference in references if reference not in done]

    def get(reference: object, **_: object) -> object:
        if isinstance(reference, list):
            return [get(one) for one in reference]
        value = reference[1] if isinstance(reference, tuple) else f"{reference} done"
        if isinstance(value, Exception):
            raise value
        return value

    ray.wait.side_effect, ray.get.side_effect = wait, get


def test_the_wait_ends_when_all_trainer_ranks_are_done(ray: MagicMock) -> None:
    simulated(ray, {"rank 0": 3, "rank 1": 1})
    assert sync.wait_for_sync(["rank 0", "rank 1"], [Engine(None, None, None)]) == [
        "rank 0 done",
        "rank 1 done",
    ]


def test_an_engines_error_ends_the_wait_for_a_stopped_trainer(ray: MagicMock) -> None:
    simulated(ray, {"rank 0": 1000})
    with pytest.raises(sync.SyncError, match="bucket 3: rank 0 does not answer"):
        sync.wait_for_sync(["rank 0"], [Engine(None, None), Engine(None, "bucket 3: rank 0 does not answer")])


def test_a_dead_engine_ends_the_wait(ray: MagicMock) -> None:
    simulated(ray, {"rank 0": 1000})
    with pytest.raises(sync.SyncError, match="an actor is dead: killed"):
        sync.wait_for_sync(["rank 0"], [Engine(Dead("killed"))])


def test_a_dead_trainer_is_an_error_with_an_engines_report(
    ray: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_waits, "POLL_SECONDS", 0.01)
    simulated(ray, {"rank 0": 1000})
    references = ["rank 0", (1, Dead("killed"))]
    with pytest.raises(
        actor_registry.PeerError, match=r"^an actor is dead: killed; bucket 3: rank 1 is silent$"
    ):
        sync.wait_for_sync(references, [Engine(None, None, "bucket 3: rank 1 is silent")])


def test_queries_about_a_dead_trainer_end(ray: MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "0.04")
    monkeypatch.setattr(actor_waits, "POLL_SECONDS", 0.01)
    simulated(ray, {"rank 0": 1000})
    with pytest.raises(actor_registry.PeerError, match=r"^an actor is dead: killed$"):
        sync.wait_for_sync([(1, Dead("killed"))], [Engine(*[None] * 100)])


def test_the_error_of_a_trainers_task_is_unchanged(ray: MagicMock) -> None:
    simulated(ray, {"rank 0": 1000})
    with pytest.raises(Failed, match="bucket 3"):
        sync.wait_for_sync([(1, Failed("bucket 3"))], [Engine(None)])


def test_trainers_without_engines_are_awaited(ray: MagicMock) -> None:
    simulated(ray, {"rank 0": 3})
    assert sync.wait_for_sync(["rank 0"], None) == ["rank 0 done"]
