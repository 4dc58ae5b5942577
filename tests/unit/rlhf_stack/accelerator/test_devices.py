"""On a GPU every function is upstream's own line; on a CPU it asks nothing of torch.cuda."""

import os
import sys
import types
from unittest.mock import MagicMock, call

import pytest
from rlhf_stack.accelerator import devices, visible_devices
from rlhf_stack.config import env_vars


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """A torch built for CUDA, that records what it is asked."""
    torch = MagicMock()
    torch.version.cuda, torch.version.hip = "12.8", None
    torch.cuda.current_device.return_value = 3
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A torch built for CPUs: it has no ``torch.cuda`` here, so that any use of it fails."""
    torch = types.SimpleNamespace(
        version=types.SimpleNamespace(cuda=None, hip=None), device=lambda name: f"device {name}"
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


def test_on_a_gpu_each_call_is_upstreams_line(gpu: MagicMock) -> None:
    assert devices.device_type() == "cuda"
    assert devices.current_device() == 3
    assert devices.torch_device() is gpu.device.return_value
    assert devices.current_stream() is gpu.cuda.current_stream.return_value
    devices.set_device(5)
    devices.synchronize()
    devices.empty_cache()
    assert gpu.mock_calls == [
        call.cuda.current_device(),
        call.cuda.current_device(),
        call.device("cuda:3"),
        call.cuda.current_stream(),
        call.cuda.set_device(5),
        call.cuda.synchronize(),
        call.cuda.empty_cache(),
    ]


def test_rocm_is_a_gpu_too(gpu: MagicMock) -> None:
    gpu.version.cuda, gpu.version.hip = None, "6.1"
    assert devices.device_type() == "cuda"


@pytest.mark.usefixtures("gpu")
def test_what_the_image_was_made_for_counts_more_than_how_torch_was_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(env_vars.ACCELERATOR, "cpu")
    assert devices.device_type() == "cpu"
    monkeypatch.setenv(env_vars.ACCELERATOR, "rocm")
    assert devices.device_type() == "cuda"


def test_a_gpu_is_named_by_its_uuid_also_if_ray_gave_it_another_name(
    gpu: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(devices.GPU_ID, "node:0")
    gpu.cuda.get_device_properties.return_value.uuid = "GPU-1234"
    assert devices.physical_gpu_id() == "GPU-1234"
    gpu.cuda.get_device_properties.assert_called_once_with(3)


@pytest.mark.usefixtures("gpu")
def test_a_cuda_handle_opens_on_the_receivers_device() -> None:
    rebuild = MagicMock()
    sent = (0, 1, 2, 3, 4, 5, 6, 7, 8)
    assert devices.open_handle((rebuild, sent), 2) is rebuild.return_value
    rebuild.assert_called_once_with(0, 1, 2, 3, 4, 5, 2, 7, 8)


@pytest.mark.usefixtures("gpu")
def test_a_gpu_engine_hands_nothing_to_its_child_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(devices.GPU_ID, raising=False)
    devices.export_physical_gpu_id("mp")
    assert devices.GPU_ID not in os.environ


@pytest.mark.usefixtures("cpu")
def test_on_a_cpu_nothing_asks_for_cuda() -> None:
    assert devices.device_type() == "cpu"
    assert devices.current_device() == devices.torch_device() == "device cpu"
    assert devices.current_stream() is None
    devices.set_device(1)
    devices.synchronize()
    devices.empty_cache()


@pytest.mark.usefixtures("cpu")
def test_a_cpu_handle_opens_as_it_is() -> None:
    rebuild = MagicMock()
    assert devices.open_handle((rebuild, (1, 2)), None) is rebuild.return_value
    rebuild.assert_called_once_with(1, 2)


def fake_ray(monkeypatch: pytest.MonkeyPatch, ids: list[str]) -> None:
    ray = MagicMock()
    ray.get_runtime_context.return_value.get_node_id.return_value = "abc"
    ray.get_runtime_context.return_value.get_accelerator_ids.return_value = {"GPU": ids}
    monkeypatch.setitem(sys.modules, "ray", ray)


@pytest.mark.usefixtures("cpu")
def test_a_cpu_stands_for_the_gpu_that_ray_assigned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(devices.GPU_ID, raising=False)
    fake_ray(monkeypatch, ["1"])
    assert devices.physical_gpu_id() == "abc:1"


@pytest.mark.usefixtures("cpu")
def test_without_a_gpu_from_ray_the_error_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(devices.GPU_ID, raising=False)
    fake_ray(monkeypatch, [])
    with pytest.raises(RuntimeError, match="ray start --num-gpus"):
        devices.physical_gpu_id()


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize(("executor", "exported"), [("uni", "abc:1"), (None, "abc:1"), ("ray", None)])
def test_child_processes_of_an_engine_inherit_its_gpu(
    monkeypatch: pytest.MonkeyPatch, executor: str | None, exported: str | None
) -> None:
    monkeypatch.setenv(devices.GPU_ID, "")
    monkeypatch.delenv(devices.GPU_ID)
    fake_ray(monkeypatch, ["1"])
    devices.export_physical_gpu_id(executor)
    assert os.environ.get(devices.GPU_ID) == exported


def test_an_engine_worker_is_restricted_as_its_accelerator_needs(
    gpu: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert devices.environment_for([5, 4]) == {visible_devices.CUDA: "5,4"}
    gpu.version.hip = "6.1"
    assert devices.environment_for(["5"]) == {visible_devices.CUDA: "5", visible_devices.HIP: "5"}
    monkeypatch.setenv(env_vars.ACCELERATOR, "cuda")
    assert devices.environment_for([5]) == {visible_devices.CUDA: "5"}
