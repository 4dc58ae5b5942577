"""The GPU that Ray assigned to this actor, as this process counts GPUs."""

import os

from rlhf_stack.accelerator import devices, visible_devices
from rlhf_stack.compat import ray_private
from rlhf_stack.lazy import ray


def local_rank() -> int:
    """Return the ordinal of the GPU that Ray assigned to this actor among those that this process sees.

    Correct whether Ray restricted the process or a NOSET variable prevented it. 0 on a CPU, outside Ray, and
    without a GPU from Ray. Raises `visible_devices.VisibleDevicesError` if two variables contradict each
    other.
    """
    if not devices.is_gpu():
        return 0
    if not ray.is_initialized() or not (assigned := ray.get_gpu_ids()):
        return 0
    variable = ray_private.visible_devices_variable()
    return visible_devices.ordinal(str(assigned[0]), os.environ, devices.kind(), variable)
