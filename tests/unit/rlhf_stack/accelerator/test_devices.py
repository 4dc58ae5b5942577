"""Device calls: on a GPU as in upstream, on a CPU without any call of torch.cuda."""

import os
import socket
import sys
import types
from unittest.mock import MagicMock, call

import pytest
from rlhf_stack.accelerator import devices, visible_devices
from rlhf_stack.config import env_vars

from tests.unit.fake_cuda import Gpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """A torch built for CUDA that records its calls."""
    torch = MagicMock()
    torch.version.cuda, torch.version.hip = "12.8", None
    torch.cuda.current_device.return_value = 3
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A torch built for CPUs, without ``torch.cuda``, so that any use of it fails."""
    torch = types.SimpleNamespace(
        version=types.SimpleNamespace(cuda=None, hip=None), device=lambda name: f"device {name}"
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


def test_gpu_calls_equal_upstreams(gpu: MagicMock) -> None:
    assert devices.device_type() == "cuda"
    assert devices.current_device() == 3
    assert devices.torch_device() is gpu.device.return_value
    assert devices.current_stream() is gpu.cuda.current_stream.return_value
    devices.set_device(5)
    devices.synchronize()
    devices.empty_cache()
    assert devices.collective_backend() == "nccl"
    assert gpu.mock_calls == [
        call.cuda.current_device(),
        call.cuda.current_device(),
        call.device("cuda:3"),
        call.cuda.current_stream(),
        call.cuda.set_device(5),
        call.cuda.synchronize(),
        call.cuda.ipc_collect(),
        call.cuda.empty_cache(),
    ]


def test_rocm_is_a_gpu_too(gpu: MagicMock) -> None:
    gpu.version.cuda, gpu.version.hip = None, "6.1"
    assert devices.device_type() == "cuda"


@pytest.mark.usefixtures("gpu")
def test_image_takes_precedence_over_the_build_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.ACCELERATOR, "cpu")
    assert devices.device_type() == "cpu"
    monkeypatch.setenv(env_vars.ACCELERATOR, "rocm")
    assert devices.device_type() == "cuda"


def test_gpu_id_is_its_uuid_whatever_ray_calls_it(gpu: MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(devices.GPU_ID, "node:0")
    gpu.cuda.get_device_properties.return_value.uuid = "GPU-1234"
    assert devices.physical_gpu_id() == "GPU-1234"
    gpu.cuda.get_device_properties.assert_called_once_with(3)


def test_a_gpu_is_selected_by_its_id_whatever_ray_has_hidden(
    cuda: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(visible_devices.CUDA, "")
    devices.select_gpu(cuda.uuids[2])
    assert visible_devices.CUDA not in os.environ
    assert devices.current_device() == 2
    assert devices.physical_gpu_id() == cuda.uuids[2]
    with pytest.raises(RuntimeError, match="has no GPU 7, but 00000000-aaaa, 00000001-aaaa"):
        devices.select_gpu("7")


@pytest.mark.parametrize(
    ("visible", "name"), [({}, "1"), ({visible_devices.CUDA: "4,6"}, "6"), ({visible_devices.HIP: "4"}, "1")]
)
def test_without_uuids_a_gpu_is_what_the_variable_lists(
    gpu: MagicMock, monkeypatch: pytest.MonkeyPatch, visible: dict[str, str], name: str
) -> None:
    for variable in devices.VISIBLE_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    for variable, value in visible.items():
        monkeypatch.setenv(variable, value)
    gpu.cuda.current_device.return_value = 1
    gpu.cuda.get_device_properties.return_value = object()
    assert devices.physical_gpu_id() == f"{socket.gethostname()}:{name}"


@pytest.mark.usefixtures("gpu")
def test_cuda_handle_opens_on_the_receivers_device() -> None:
    rebuild = MagicMock()
    sent = (0, 1, 2, 3, 4, 5, 6, 7, 8)
    assert devices.open_handle((rebuild, sent), 2) is rebuild.return_value
    rebuild.assert_called_once_with(0, 1, 2, 3, 4, 5, 2, 7, 8)


@pytest.mark.usefixtures("gpu")
def test_gpu_engine_exports_no_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(devices.GPU_ID, raising=False)
    devices.export_physical_gpu_id("mp")
    assert devices.GPU_ID not in os.environ


@pytest.mark.usefixtures("cpu")
def test_cpu_calls_do_not_use_cuda() -> None:
    assert devices.device_type() == "cpu"
    assert devices.current_device() == devices.torch_device() == "device cpu"
    assert devices.current_stream() is None
    devices.set_device(1)
    devices.synchronize()
    devices.empty_cache()
    assert devices.collective_backend() == "gloo"


@pytest.mark.usefixtures("cpu")
def test_cpu_handle_opens_unchanged() -> None:
    rebuild = MagicMock()
    assert devices.open_handle((rebuild, (1, 2)), None) is rebuild.return_value
    rebuild.assert_called_once_with(1, 2)


def fake_ray(monkeypatch: pytest.MonkeyPatch, ids: list[str]) -> None:
    ray = MagicMock()
    ray.get_runtime_context.return_value.get_node_id.return_value = "abc"
    ray.get_runtime_context.return_value.get_accelerator_ids.return_value = {"GPU": ids}
    monkeypatch.setitem(sys.modules, "ray", ray)


@pytest.mark.usefixtures("cpu")
def test_cpu_has_the_id_of_rays_simulated_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(devices.GPU_ID, raising=False)
    fake_ray(monkeypatch, ["1"])
    assert devices.physical_gpu_id() == "abc:1"


@pytest.mark.usefixtures("cpu")
def test_missing_gpu_is_an_error_with_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_restriction_of_an_engine_worker_follows_the_accelerator(
    gpu: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert devices.environment_for([5, 4]) == {visible_devices.CUDA: "5,4"}
    gpu.version.hip = "6.1"
    assert devices.environment_for(["5"]) == {visible_devices.CUDA: "5", visible_devices.HIP: "5"}
    monkeypatch.setenv(env_vars.ACCELERATOR, "cuda")
    assert devices.environment_for([5]) == {visible_devices.CUDA: "5"}
