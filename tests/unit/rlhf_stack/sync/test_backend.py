"""Checks of the backend, and groups over NCCL; groups of real processes are in tests/cluster."""

import sys
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
from rlhf_stack import sync
from rlhf_stack.config import env_vars
from rlhf_stack.sync import backend, nccl


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


@pytest.mark.parametrize(("version", "refused"), [("0.4.2", False), ("0.4.3", True), ("0.6.3.post1", True)])
def test_nccl_with_a_vllm_whose_workers_block_is_refused(
    version: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, the installed versions are checked before any engine joins; gloo and CPUs are not refused."""
    installed = [
        SimpleNamespace(name="openrlhf", version="0.5.1"),
        SimpleNamespace(name="vllm", version=version),
    ]
    monkeypatch.setattr(backend, "distributions", lambda: installed)
    monkeypatch.setenv(env_vars.ACCELERATOR, "cuda")
    sync.check_backend("gloo", with_ray=False)
    if refused:
        expected = rf"vllm {version}; .*vllm#5477.*; use vLLM 0\.4\.2, or .*, or --vllm\.sync_backend gloo$"
        with pytest.raises(sync.SyncError, match=expected):
            sync.check_backend("nccl", with_ray=False)
    else:
        sync.check_backend("nccl", with_ray=False)
    monkeypatch.setenv(env_vars.ACCELERATOR, "cpu")
    sync.check_backend("nccl", with_ray=False)


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
