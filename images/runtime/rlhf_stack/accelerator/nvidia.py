"""The NVIDIA GPUs that the processes of this machine or container can use."""

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")
RECOVERY_ACTION = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, which older releases of pynvml do not name
# Other actions, such as "drain and reset", leave a GPU that still computes.
RESETS = {1: "a reset of the GPU", 2: "a reboot", 6: "a reset of the GPU's bus", 7: "a reboot"}
NO_PERMISSION, IS_LOST, RESET_REQUIRED = 4, 15, 16  # NVML's error codes
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


def faults() -> dict[int, str]:
    """Return why a GPU cannot be used, by its number: it is lost, or the driver requires a reset or a reboot.

    Empty without NVML. GPUs to which this process has no access are left out.
    """
    found: dict[int, str] = {}
    with _nvml() as nvml, suppress(Exception):  # NVML's own errors
        if nvml is not None:
            for index in range(int(nvml.nvmlDeviceGetCount())):
                if fault := _fault(nvml, index):
                    found[index] = fault
    return found


def _fault(nvml: Any, index: int) -> str:
    """Return why the GPU cannot be used, "" if it can or if the driver reports no recovery action."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except Exception as error:  # NVML's own errors
        return "" if _code(error) in (None, NO_PERMISSION) else str(error)
    try:
        [answer] = nvml.nvmlDeviceGetFieldValues(handle, [RECOVERY_ACTION])
        if answer.nvmlReturn:
            raise nvml.NVMLError(answer.nvmlReturn)
    except Exception as error:  # also of a driver that does not know the field
        return str(error) if _code(error) in (IS_LOST, RESET_REQUIRED) else ""
    action = RESETS.get(int(answer.value.uiVal))
    return f"the driver requires {action}" if action else ""


def _code(error: Exception) -> object:
    """Return the code of an error of NVML, None for another error."""
    return getattr(error, "value", None)


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
