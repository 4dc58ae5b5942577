"""Checks of the backend. Groups over NCCL are in test_gpu_sync.py, those of processes in tests/cluster."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from rlhf_stack import sync
from rlhf_stack.config import env_vars
from rlhf_stack.sync import actor_trainer, backend_selection
from rlhf_stack.sync.trainer import uses_ray_collectives


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


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("requested", [False, True])
def test_rays_collectives_have_no_effect_on_shared_gpus(
    requested: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Upstream ignores them there; the weights are sent as without the option, and a warning says so."""
    sent = MagicMock(return_value=0)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0, raising=False)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1, raising=False)

    def gather(objects: list[object], own: object) -> None:
        objects[:] = [own]

    monkeypatch.setattr("torch.distributed.all_gather_object", gather, raising=False)
    monkeypatch.setattr(actor_trainer, "join_workers_of_same_gpus", lambda _: None)
    monkeypatch.setattr(actor_trainer, "synced_names", lambda _: [])
    monkeypatch.setattr(actor_trainer, "send", sent)
    vllm = SimpleNamespace(sync_backend="nccl", sync_with_ray=requested)
    arguments = SimpleNamespace(train=SimpleNamespace(colocate_all=True, async_enable=False), vllm=vllm)
    assert not uses_ray_collectives(arguments)
    actor_trainer._send(SimpleNamespace(strategy=SimpleNamespace(args=arguments)))
    sent.assert_called_once()
    assert ("--vllm.sync_with_ray has no effect" in caplog.text) == requested


@pytest.mark.parametrize(
    ("openrlhf", "version", "refused"),
    [
        *(("0.5.1", version, False) for version in ("0.4.2", "0.4.2+stack.1")),
        *(("0.5.1", version, True) for version in ("0.4.3", "0.5.5", "0.6.3", "0.6.3.post1")),
        *(("0.11.2", version, False) for version in ("0.6.4.post1", "0.10.0", "0.29.0")),
    ],
)
def test_nccl_with_a_vllm_whose_workers_block_is_refused(
    openrlhf: str, version: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, the installed versions are checked before any engine joins; gloo and CPUs are not refused."""
    installed = [
        SimpleNamespace(name="openrlhf", version=openrlhf),
        SimpleNamespace(name="vllm", version=version),
    ]
    monkeypatch.setattr(backend_selection, "distributions", lambda: installed)
    monkeypatch.setenv(env_vars.ACCELERATOR, "cuda")
    sync.check_backend("gloo", with_ray=False)
    if refused:
        expected = rf"vllm {version}; .*vllm#5477.*; use vLLM 0\.4\.2, or .*, or --vllm\.sync_backend gloo$"
        with pytest.raises(sync.SyncError, match=expected) as refusal:
            sync.check_backend("nccl", with_ray=False)
        assert "OpenRLHF#313" in str(refusal.value)
    else:
        sync.check_backend("nccl", with_ray=False)
    monkeypatch.setenv(env_vars.ACCELERATOR, "cpu")
    sync.check_backend("nccl", with_ray=False)
