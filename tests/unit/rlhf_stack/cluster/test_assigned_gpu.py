"""The ordinal of the GPU that Ray assigned to a process."""

import sys
from unittest.mock import MagicMock

import pytest
from rlhf_stack.accelerator import visible_devices
from rlhf_stack.cluster import assigned_gpu
from rlhf_stack.compat import ray_private
from rlhf_stack.config import env_vars


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.ACCELERATOR, "cuda")


def ray_assigns(
    monkeypatch: pytest.MonkeyPatch, gpu: str | None, variable: str = visible_devices.CUDA
) -> None:
    ray = MagicMock()
    ray.get_gpu_ids.return_value = [] if gpu is None else [gpu]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(ray_private, "visible_devices_variable", lambda: variable)
    for name in (visible_devices.CUDA, visible_devices.HIP, visible_devices.ROCR):
        monkeypatch.delenv(name, raising=False)


def test_local_rank_counts_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_assigns(monkeypatch, "4")
    assert assigned_gpu.local_rank() == 4
    monkeypatch.setenv(visible_devices.CUDA, "5,4")
    assert assigned_gpu.local_rank() == 1
    monkeypatch.setenv(visible_devices.CUDA, "4")
    assert assigned_gpu.local_rank() == 0


def test_local_rank_follows_the_variable_by_which_ray_names_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.ACCELERATOR, "rocm")
    ray_assigns(monkeypatch, "4", visible_devices.ROCR)
    monkeypatch.setenv(visible_devices.ROCR, "5,4")
    assert assigned_gpu.local_rank() == 1


def test_local_rank_without_a_gpu_from_ray_is_0(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_assigns(monkeypatch, None)
    assert assigned_gpu.local_rank() == 0
    ray_assigns(monkeypatch, "4")
    sys.modules["ray"].is_initialized.return_value = False
    assert assigned_gpu.local_rank() == 0


def test_local_rank_on_a_cpu_is_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.ACCELERATOR, "cpu")
    ray_assigns(monkeypatch, "4")
    assert assigned_gpu.local_rank() == 0
