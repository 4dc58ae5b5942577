"""The NVIDIA GPUs that the processes of this machine or container can use."""

import importlib
from pathlib import Path

DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")


def count() -> int:
    """Return the number of GPUs, whatever CUDA_VISIBLE_DEVICES hides; 0 without a driver.

    NVML counts the GPUs of a container. The driver's files, which are the fallback, are those of the machine
    where the container toolkit works by CDI.
    """
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # pynvml is missing, or NVML's own error: no driver, or no access to it
        return sum(1 for _ in DRIVER_GPUS.glob("*"))
    try:
        return int(nvml.nvmlDeviceGetCount())
    finally:
        nvml.nvmlShutdown()
