"""The NVIDIA GPUs that the processes of this machine or container can use."""

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")
MODEL = re.compile(r"^Model:\s*(\S.*?)\s*$", re.MULTILINE)


def count() -> int:
    """Return the number of GPUs, whatever CUDA_VISIBLE_DEVICES hides; 0 without a driver.

    NVML counts the GPUs of a container. The driver's files, which are the fallback, are those of the machine
    where the container toolkit works by CDI.
    """
    with _nvml() as nvml, suppress(Exception):  # NVML's own errors
        if nvml is not None:
            return int(nvml.nvmlDeviceGetCount())
    return sum(1 for _ in DRIVER_GPUS.glob("*"))


def models() -> tuple[str, ...]:
    """Return the model of each GPU without nvidia-smi: by NVML, otherwise from the driver's files."""
    with _nvml() as nvml, suppress(Exception):  # NVML's own error: a GPU has fallen off the bus
        if nvml is not None:
            handles = map(nvml.nvmlDeviceGetHandleByIndex, range(int(nvml.nvmlDeviceGetCount())))
            return tuple(_text(nvml.nvmlDeviceGetName(handle)) for handle in handles)
    found = []
    for file in sorted(DRIVER_GPUS.glob("*/information")):
        with suppress(OSError):
            found += MODEL.findall(file.read_text(encoding="utf-8", errors="replace"))
    return tuple(found)


@contextmanager
def _nvml() -> Iterator[Any]:
    """Yield NVML, initialized; None if pynvml is missing, or NVML has no driver or no access to it."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # NVML's own errors
        yield None
        return
    try:
        yield nvml
    finally:
        with suppress(Exception):
            nvml.nvmlShutdown()


def _text(name: str | bytes) -> str:
    """Return a name of NVML, which is bytes in older releases of pynvml."""
    return name if isinstance(name, str) else name.decode(errors="replace")
