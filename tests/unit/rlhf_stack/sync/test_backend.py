"""Checks of the backend. Groups over NCCL are in test_gpu_sync.py, those of processes in tests/cluster."""

from types import SimpleNamespace

import pytest
from rlhf_stack import sync
from rlhf_stack.config import env_vars
from rlhf_stack.sync import backend_selection


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
    monkeypatch.setattr(backend_selection, "distributions", lambda: installed)
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
