"""The accelerator of this process, in place of upstream's hard-coded ``torch.cuda``.

The image decides which one it is, otherwise the build of torch, but not what is visible: a CUDA or ROCm image
without a usable GPU fails as upstream does instead of silently training on the CPU.
"""

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

from rlhf_stack.accelerator import visible_devices
from rlhf_stack.config import env_vars
from rlhf_stack.lazy import ray, torch

GPU_ID = "RLHF_STACK_GPU_ID"  # set for the child processes of an engine actor, never by users
VISIBLE_VARIABLES = (visible_devices.CUDA, visible_devices.HIP, visible_devices.ROCR)
DEVICE_ARGUMENT = 6  # of torch.multiprocessing.reductions.rebuild_cuda_tensor

Handle = tuple[Callable[..., "torch.Tensor"], tuple[Any, ...]]


def is_gpu() -> bool:
    """Report whether tensors live on GPUs: by the image, otherwise by the build of torch.

    The image comes first because some torch releases exist as a CUDA build only, which a CPU image then
    contains too.
    """
    if (accelerator := env_vars.accelerator()) is not None:
        return accelerator != "cpu"
    return torch.version.cuda is not None or torch.version.hip is not None


def kind() -> visible_devices.Kind:
    """Return the platform whose rules for visible devices apply: by the image, otherwise by torch's build."""
    if (accelerator := env_vars.accelerator()) is not None:
        return "rocm" if accelerator == "rocm" else "cuda"
    return "cuda" if torch.version.hip is None else "rocm"


def environment_for(gpu_ids: Sequence[object]) -> dict[str, str]:
    """Return the variables that restrict an engine worker to the GPUs ``gpu_ids`` of its node, in order."""
    return visible_devices.environment_for(gpu_ids, kind())


def device_type() -> str:
    """Return torch's device type, "cuda" (also on ROCm) or "cpu"."""
    return "cuda" if is_gpu() else "cpu"


def collective_backend() -> str:
    """Return the backend of torch.distributed that serves this accelerator (on ROCm, RCCL is called nccl)."""
    return "nccl" if is_gpu() else "gloo"


def current_device() -> "int | torch.device":
    """Return the current GPU's index, as ``torch.cuda.current_device``, or the CPU device."""
    return torch.cuda.current_device() if is_gpu() else torch.device("cpu")


def torch_device() -> "torch.device":
    """Return `current_device` as a ``torch.device``."""
    return torch.device(f"cuda:{torch.cuda.current_device()}") if is_gpu() else torch.device("cpu")


def set_device(local_rank: int) -> None:
    """Make GPU ``local_rank`` the current one; does nothing on a CPU."""
    if is_gpu():
        torch.cuda.set_device(local_rank)


def synchronize() -> None:
    """Wait for the current GPU; does nothing on a CPU, which computes synchronously."""
    if is_gpu():
        torch.cuda.synchronize()


def empty_cache() -> None:
    """Return the GPU's memory that torch has cached to the driver; does nothing on a CPU.

    Memory that another process had open is cached only when torch has checked that it is closed.
    """
    if is_gpu():
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def current_stream() -> "torch.cuda.Stream | None":
    """Return the current GPU stream, or None on a CPU."""
    if not is_gpu():
        return None
    return torch.cuda.current_stream()


def physical_gpu_id() -> str:
    """Return an id of this process's GPU that is equal in the trainer and the engine that share the GPU.

    On a GPU its UUID. On a CPU the node and the id of Ray's simulated GPU: from Ray in an actor, and from the
    environment in a process that an engine actor started (see `export_physical_gpu_id`).
    """
    if is_gpu():
        return _gpu_id(torch.cuda.current_device())
    inherited = os.environ.get(GPU_ID)
    if inherited is not None:
        return inherited
    context = ray.get_runtime_context()
    ids = context.get_accelerator_ids()["GPU"]
    if not ids:
        raise RuntimeError(
            f"no GPU is assigned to this process (node {context.get_node_id()}), so it cannot share one: "
            "start the node with `ray start --num-gpus N`"
        )
    return f"{context.get_node_id()}:{ids[0]}"


def select_gpu(gpu: str) -> None:
    """Make the GPU of this node with the id ``gpu`` (`physical_gpu_id`) the current one.

    No variable can name it: torch's UUIDs lack the prefix that CUDA expects. The process must not have used
    CUDA yet. `RuntimeError` if the node has no such GPU.
    """
    for variable in VISIBLE_VARIABLES:
        os.environ.pop(variable, None)
    found = [_gpu_id(index) for index in range(torch.cuda.device_count())]
    if gpu not in found:
        raise RuntimeError(f"{socket.gethostname()} has no GPU {gpu}, but {', '.join(found) or 'none'}")
    torch.cuda.set_device(found.index(gpu))


def _gpu_id(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    # torch 2.3 has no UUIDs
    return str(getattr(properties, "uuid", f"{socket.gethostname()}:{_visible_device(index)}"))


def _visible_device(index: int) -> str:
    """Return the name of device ``index`` in the variable that restricts this process."""
    listed = next((os.environ[name] for name in VISIBLE_VARIABLES if os.environ.get(name)), "")
    names = listed.split(",") if listed else []
    return names[index] if index < len(names) else str(index)


def export_physical_gpu_id(executor: str | None) -> None:
    """Export the GPU id of an engine actor to workers that are its child processes.

    ``executor`` is vLLM's ``distributed_executor_backend``; with "ray" the workers are actors themselves.
    """
    if not is_gpu() and executor != "ray":
        os.environ[GPU_ID] = physical_gpu_id()


def open_handle(handle: Handle, device_index: int | None) -> "torch.Tensor":
    """Rebuild the tensor of a ``handle`` from ``torch.multiprocessing.reductions.reduce_tensor``.

    A CUDA handle has the sender's device index. It is replaced by the receiver's, ``device_index``, because
    the two may have different visible devices. A CPU handle has none.
    """
    rebuild, arguments = handle
    if not is_gpu():
        return rebuild(*arguments)
    changed = list(arguments)
    changed[DEVICE_ARGUMENT] = device_index
    return rebuild(*changed)
