"""The accelerator of this process, in place of upstream's hard-wired ``torch.cuda``.

Which one it is follows from the image, or from how torch was built, not from what is visible: a CUDA or ROCm
image without a usable GPU fails as upstream does instead of training on the CPU unnoticed.
"""

import os
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_stack.accelerator import visible_devices
from rlhf_stack.config import env_vars

if TYPE_CHECKING:
    import torch

GPU_ID = "RLHF_STACK_GPU_ID"  # set for the child processes of an engine actor, never by users
VISIBLE = (visible_devices.CUDA, visible_devices.HIP, visible_devices.ROCR)
DEVICE_ARGUMENT = 6  # of torch.multiprocessing.reductions.rebuild_cuda_tensor

Handle = tuple[Callable[..., "torch.Tensor"], tuple[Any, ...]]


def is_gpu() -> bool:
    """Whether tensors live on GPUs: as the image says, else as torch was built.

    The image comes first because some torch releases are on the index as a CUDA build only, which a CPU image
    carries too.
    """
    if (accelerator := env_vars.accelerator()) is not None:
        return accelerator != "cpu"
    import torch

    return torch.version.cuda is not None or torch.version.hip is not None


def kind() -> visible_devices.Kind:
    """Whose rules the visible devices of this process follow; the image says it, else how torch was built."""
    if (accelerator := env_vars.accelerator()) is not None:
        return "rocm" if accelerator == "rocm" else "cuda"
    import torch

    return "cuda" if torch.version.hip is None else "rocm"


def local_rank() -> int:
    """The ordinal of the GPU that Ray assigned to this actor among those that this process sees.

    It holds whether Ray restricted the process or was told not to by one of its NOSET variables. 0 on a CPU,
    outside of Ray, and without a GPU from Ray. `visible.Disagreement` names two variables that cannot both
    hold.
    """
    if not is_gpu():
        return 0
    import ray

    if not ray.is_initialized() or not (assigned := ray.get_gpu_ids()):
        return 0
    from ray._private.accelerators import get_accelerator_manager_for_resource

    variable = get_accelerator_manager_for_resource("GPU").get_visible_accelerator_ids_env_var()
    return visible_devices.ordinal(str(assigned[0]), os.environ, kind(), variable)


def restricted_to(gpu_ids: Sequence[object]) -> dict[str, str]:
    """The variables with which an engine worker sees the GPUs ``gpu_ids`` of its node, in this order."""
    return visible_devices.restricted(gpu_ids, kind())


def device_type() -> str:
    """What ``init_device_mesh``, ``Tensor.to`` and ``torch.empty(device=)`` want: "cuda" or "cpu"."""
    return "cuda" if is_gpu() else "cpu"


def current_device() -> "int | torch.device":
    """The current GPU's index, as ``torch.cuda.current_device``, or the CPU device."""
    import torch

    return torch.cuda.current_device() if is_gpu() else torch.device("cpu")


def torch_device() -> "torch.device":
    """`current_device` as a ``torch.device``."""
    import torch

    return torch.device(f"cuda:{torch.cuda.current_device()}") if is_gpu() else torch.device("cpu")


def set_device(local_rank: int) -> None:
    """Make GPU ``local_rank`` the current one; a CPU has no such choice."""
    if is_gpu():
        import torch

        torch.cuda.set_device(local_rank)


def synchronize() -> None:
    """Wait for the current GPU; CPU tensors are computed when the call returns."""
    if is_gpu():
        import torch

        torch.cuda.synchronize()


def empty_cache() -> None:
    """Give cached GPU memory back; the CPU allocator keeps no such cache."""
    if is_gpu():
        import torch

        torch.cuda.empty_cache()


def current_stream() -> "torch.cuda.Stream | None":
    """The current GPU stream, or None on a CPU."""
    if not is_gpu():
        return None
    import torch

    return torch.cuda.current_stream()


def physical_gpu_id() -> str:
    """What names the GPU of this process alike in the trainer and in the engine that share it.

    On a GPU its UUID. On a CPU the node and the id of Ray's (fake) GPU: read from Ray in an actor, and from
    the environment in a process that an engine actor started (see `export_physical_gpu_id`).
    """
    if is_gpu():
        import torch

        index = torch.cuda.current_device()
        properties = torch.cuda.get_device_properties(index)
        # torch 2.3 knows no UUIDs
        return str(getattr(properties, "uuid", f"{socket.gethostname()}:{_visible_device(index)}"))
    inherited = os.environ.get(GPU_ID)
    if inherited is not None:
        return inherited
    import ray

    context = ray.get_runtime_context()
    ids = context.get_accelerator_ids()["GPU"]
    if not ids:
        raise RuntimeError(
            f"no GPU is assigned to this process (node {context.get_node_id()}), so it shares none: "
            "start the node with `ray start --num-gpus N`"
        )
    return f"{context.get_node_id()}:{ids[0]}"


def _visible_device(index: int) -> str:
    """What device ``index`` of this process is called where devices are made visible by a variable."""
    listed = next((os.environ[name] for name in VISIBLE if os.environ.get(name)), "")
    names = listed.split(",") if listed else []
    return names[index] if index < len(names) else str(index)


def export_physical_gpu_id(executor: str | None) -> None:
    """Hand the GPU id of an engine actor to its workers when they are its child processes.

    ``executor`` is vLLM's ``distributed_executor_backend``; with "ray" the workers are actors themselves.
    """
    if not is_gpu() and executor != "ray":
        os.environ[GPU_ID] = physical_gpu_id()


def open_handle(handle: Handle, device_index: int | None) -> "torch.Tensor":
    """The tensor behind ``torch.multiprocessing.reductions.reduce_tensor``'s ``handle``.

    A CUDA handle names the sender's device index, which is replaced by the receiver's: the two may have
    different visible devices. A CPU handle names none.
    """
    rebuild, arguments = handle
    if not is_gpu():
        return rebuild(*arguments)
    changed = list(arguments)
    changed[DEVICE_ARGUMENT] = device_index
    return rebuild(*changed)
