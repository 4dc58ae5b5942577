"""rlhf_stack.accelerator.nvidia, with stand-ins for NVML and for the driver's files."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from rlhf_stack.accelerator import nvidia


@pytest.fixture(autouse=True)
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with three GPUs."""
    for name in ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(nvidia, "DRIVER_GPUS", tmp_path)


def test_a_container_has_the_gpus_that_nvml_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = MagicMock(**{"nvmlDeviceGetCount.return_value": 2})
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert nvidia.count() == 2
    nvml.nvmlShutdown.assert_called_once_with()


@pytest.mark.parametrize(
    "nvml",
    [
        None,
        MagicMock(**{"nvmlInit.side_effect": OSError("no driver")}),
        MagicMock(**{"nvmlDeviceGetCount.side_effect": OSError, "nvmlShutdown.side_effect": OSError}),
    ],
)
def test_without_nvml_the_drivers_files_are_counted(
    monkeypatch: pytest.MonkeyPatch, nvml: MagicMock | None, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert nvidia.count() == 3
    monkeypatch.setattr(nvidia, "DRIVER_GPUS", tmp_path / "no-driver")
    assert nvidia.count() == 0


@pytest.mark.parametrize("name", ["NVIDIA H100", b"NVIDIA H100"], ids=["text", "bytes of older releases"])
def test_models_are_those_of_nvml(monkeypatch: pytest.MonkeyPatch, name: str | bytes) -> None:
    nvml = MagicMock(**{"nvmlDeviceGetCount.return_value": 2, "nvmlDeviceGetName.return_value": name})
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert nvidia.models() == ("NVIDIA H100", "NVIDIA H100")
    nvml.nvmlShutdown.assert_called_once_with()


@pytest.mark.parametrize(
    "nvml",
    [
        None,
        MagicMock(**{"nvmlInit.side_effect": OSError("no driver")}),
        MagicMock(**{"nvmlDeviceGetCount.return_value": 1, "nvmlDeviceGetName.side_effect": OSError("lost")}),
    ],
)
def test_without_nvml_the_drivers_files_name_the_models(
    monkeypatch: pytest.MonkeyPatch, nvml: MagicMock | None, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert nvidia.models() == ()
    (tmp_path / "0000:02:00.0" / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:  16\n")
    assert nvidia.models() == ("NVIDIA H100 80GB HBM3",)


class NvmlError(Exception):
    """An error of pynvml, which has its code as ``value``."""

    def __init__(self, value: int) -> None:
        super().__init__({4: "Insufficient Permissions", 15: "GPU is lost"}.get(value, f"Code {value}"))
        self.value = value


def simulated_nvml(*gpus: Any) -> MagicMock:
    """NVML with a GPU for each of ``gpus``: the error of its handle, or the answer on its recovery action."""

    def handle(index: int) -> Any:
        if isinstance(gpus[index], Exception):
            raise gpus[index]
        return gpus[index]

    def values(answer: Any, fields: list[int]) -> list[Any]:
        assert fields == [230]
        if callable(answer):
            answer()
        code, action = answer
        return [SimpleNamespace(nvmlReturn=code, value=SimpleNamespace(uiVal=action))]

    return MagicMock(
        NVMLError=NvmlError,
        nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetFieldValues=values,
    )


@pytest.mark.parametrize(
    ("gpu", "fault"),
    [
        ((0, 0), ""),
        (NvmlError(15), "GPU is lost"),
        (NvmlError(999), "Code 999"),
        (NvmlError(4), ""),
        (OSError("not of NVML"), ""),
        ((0, 1), "the driver requires a reset of the GPU"),
        ((0, 2), "the driver requires a reboot"),
        ((0, 4), ""),
        ((15, 0), "GPU is lost"),
        ((3, 1), ""),
        (MagicMock(side_effect=NvmlError(15)), "GPU is lost"),
        (MagicMock(side_effect=NvmlError(13)), ""),
    ],
    ids=[
        *("sound", "lost", "unknown error", "of others", "another error", "reset", "reboot"),
        *("drain and reset", "lost later", "unknown field", "lost at the query", "old driver"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch, gpu: Any, fault: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml := simulated_nvml((0, 0), gpu, (0, 0)))
    assert nvidia.faults() == ({1: fault} if fault else {})
    nvml.nvmlShutdown.assert_called_once_with()


@pytest.mark.parametrize(
    "nvml",
    [
        None,
        MagicMock(**{"nvmlInit.side_effect": OSError("no driver")}),
        MagicMock(**{"nvmlDeviceGetCount.side_effect": OSError}),
    ],
)
def test_without_nvml_no_gpu_has_a_fault(monkeypatch: pytest.MonkeyPatch, nvml: MagicMock | None) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert nvidia.faults() == {}
