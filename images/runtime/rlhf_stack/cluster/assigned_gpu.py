"""The GPU that Ray assigned to this actor, as this process counts GPUs."""

import os
from typing import Any

from rlhf_stack.accelerator import devices, visible_devices
from rlhf_stack.compat import ray_private
from rlhf_stack.lazy import ray


def local_rank() -> int:
    """Return the ordinal of the GPU that Ray assigned to this actor among those that this process sees.

    Correct whether Ray restricted the process or a NOSET variable prevented it. 0 on a CPU, outside Ray, and
    without a GPU from Ray. Raises `visible_devices.VisibleDevicesError` if two variables contradict each
    other.
    """
    if not (assigned := _assigned()):
        return 0
    variable = ray_private.visible_devices_variable()
    return visible_devices.ordinal(str(assigned[0]), os.environ, devices.kind(), variable)


def select() -> None:
    """Make the GPU that Ray assigned to this actor the current one; does nothing without one.

    A NOSET variable leaves all GPUs of the node visible, of which the first one is current. Raises as
    `local_rank` does.
    """
    if _assigned():
        devices.set_device(local_rank())


def restrict() -> None:
    """Hide all GPUs but the one that Ray assigned to this actor, as OpenRLHF does for an engine of one GPU.

    To be called before torch uses a GPU; does nothing without one.
    """
    if assigned := _assigned():
        os.environ |= devices.environment_for(assigned[:1])


def _assigned() -> list[Any]:
    return list(ray.get_gpu_ids()) if devices.is_gpu() and ray.is_initialized() else []
