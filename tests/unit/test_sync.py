"""What needs no torch; a group of real processes is in tests/cluster."""

import sys
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
from rlhf_stack import settings, sync


class GetTimeoutError(Exception):
    """Stands for ray.exceptions.GetTimeoutError."""


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    fake = MagicMock()
    fake.exceptions.GetTimeoutError = GetTimeoutError
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """vLLM's communicator and rendezvous, and a torch built for CUDA."""
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
    return fake


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_backends_that_work_are_taken(backend: str) -> None:
    sync.check_backend(backend, with_ray=False)


def test_another_backend_is_refused_with_what_there_is() -> None:
    with pytest.raises(sync.SyncError, match=r"weight sync backend mpi: expected one of nccl, gloo"):
        sync.check_backend("mpi", with_ray=False)


def test_gloo_by_ray_is_refused_with_the_reason() -> None:
    with pytest.raises(sync.SyncError, match=r"leave out --vllm\.sync_with_ray"):
        sync.check_backend("gloo", with_ray=True)


def test_nccl_on_a_gpu_is_upstreams_communicator(vllm: MagicMock) -> None:
    vllm.PyNcclCommunicator.return_value.disabled = False
    group = sync.create_group("10.0.0.1", 1234, 2, 3, 0, "nccl")
    vllm.StatelessProcessGroup.create.assert_called_once_with(
        host="10.0.0.1", port=1234, rank=2, world_size=3, store_timeout=300
    )
    vllm.PyNcclCommunicator.assert_called_once_with(vllm.StatelessProcessGroup.create.return_value, device=0)
    tensor, stream = MagicMock(), MagicMock()
    group.broadcast(tensor, src=0, stream=stream)
    vllm.PyNcclCommunicator.return_value.broadcast.assert_called_once_with(tensor, src=0, stream=stream)


def test_nccl_where_vllm_has_no_communicator_for_others_is_torchs(
    vllm: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    del vllm.StatelessProcessGroup
    upstream = MagicMock()
    for name in ("openrlhf", "openrlhf.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "openrlhf.utils.distributed_util", upstream)
    monkeypatch.setenv(settings.SYNC_TIMEOUT, "7")
    group = sync.create_group("10.0.0.1", 1234, 2, 3, 0, "nccl")
    assert group.__class__ is sync.TorchNcclGroup
    upstream.init_process_group.assert_called_once_with(
        backend="nccl",
        init_method="tcp://10.0.0.1:1234",
        timeout=timedelta(seconds=7),
        world_size=3,
        rank=2,
        group_name="openrlhf",
    )


def test_a_communicator_that_would_do_nothing_is_an_error(vllm: MagicMock) -> None:
    vllm.PyNcclCommunicator.return_value.disabled = True
    with pytest.raises(sync.SyncError, match="engines would load garbage"):
        sync.create_group("10.0.0.1", 1234, 1, 3, 0, "nccl")


def test_a_wait_returns_what_ray_returns(ray: MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.SYNC_TIMEOUT, "7")
    ray.get.return_value = ["a", "b"]
    assert sync.wait(["first", "second"], "something") == ["a", "b"]
    ray.get.assert_called_once_with(["first", "second"], timeout=7.0)


def test_a_wait_that_is_over_says_for_what_and_for_whom(
    ray: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(settings.SYNC_TIMEOUT, "7")
    ray.get.side_effect = GetTimeoutError
    ray.wait.return_value = (["first"], ["second"])
    expected = (
        r"waited 7 s for loading w; engines \[1\] of 2 did not answer \(deadline: RLHF_STACK_SYNC_TIMEOUT\)"
    )
    with pytest.raises(sync.SyncError, match=expected):
        sync.wait(["first", "second"], "loading w")


def engine(answer: str) -> SimpleNamespace:
    return SimpleNamespace(__ray_ready__=SimpleNamespace(remote=lambda: answer))


def test_engines_are_awaited_before_the_rendezvous(ray: MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.ENGINE_TIMEOUT, "9")
    sync.wait_for_engines([engine("up")])
    ray.get.assert_called_once_with(["up"], timeout=9.0)


def test_an_engine_that_died_is_its_own_error(ray: MagicMock) -> None:
    ray.get.side_effect = RuntimeError("the engine's own error")
    with pytest.raises(RuntimeError, match="the engine's own error"):
        sync.wait_for_engines([engine("dead")])
