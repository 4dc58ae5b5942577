"""A device for vLLM 0.29's GPU wheel on machines without a GPU: its engines generate on the CPU.

vLLM discovers it by entry points in every process, like any vendor's device. Replaced are

* the operators. The wheel lacks vLLM's extension for CPUs, and the one for GPUs does not load without a
  driver: `operators_of_vllm_0_29` implements the few that the tests call in torch;
* the platform. It is vLLM's own for CPUs, whose worker and model runner are subclasses of those for GPUs,
  with the properties by which Ray's executor identifies a GPU. NCCL is gloo, sleep frees nothing, and each
  worker has `CACHE` bytes of cache instead of a GPU's free memory, unless a variable sets them.

Everything else is vLLM's: engine core, scheduler, executors, rendezvous, the tensor-parallel model and its
weight loading, the sampler. Not covered are CUDA graphs, model runner V2 (Triton), asynchronous scheduling,
and the parts of `rlhf_stack` that differ on a GPU: device ordinals, CUDA IPC.
"""

from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms.cpu import CpuPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CACHE = 64 << 20


class ReplacedDevice(CpuPlatform):
    """vLLM's platform for CPUs, with the properties of a GPU that its executors read."""

    # As in vLLM's CudaPlatformBase, whose module does not load without a driver.
    ray_device_key = "GPU"
    ray_noset_device_env_vars = ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]  # noqa: RUF012
    device_control_env_var = "CUDA_VISIBLE_DEVICES"

    @classmethod
    def import_kernels(cls) -> None:
        """Define the operators; importing their module does."""
        import operators_of_vllm_0_29  # noqa: F401

    def is_sleep_mode_available(self) -> bool:
        """Accept sleep mode, as on CUDA; the worker logs that it has no effect."""
        return True

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Apply the configuration for CPUs, but keep the requested executor."""
        executor = vllm_config.parallel_config.distributed_executor_backend
        super().check_and_update_config(vllm_config)
        vllm_config.parallel_config.distributed_executor_backend = executor
        cache = vllm_config.cache_config
        cache.kv_cache_memory_bytes = cache.kv_cache_memory_bytes or CACHE
        vllm_config.compilation_config.custom_ops.append("-rotary_embedding")  # vLLM has a torch version


def platform() -> str:
    """Return the platform class; the entry point in ``vllm.platform_plugins``."""
    return f"{__name__}.{ReplacedDevice.__name__}"


def linear_layers() -> None:
    """Make linear layers multiply with their weight, as on a GPU.

    It is the entry point in ``vllm.general_plugins``. On some CPUs vLLM packs the weight, by
    operators that the wheel lacks.
    """
    from vllm.model_executor.layers import utils

    utils.dispatch_cpu_unquantized_gemm = use_unpacked_weight


def use_unpacked_weight(layer: Any, remove_weight: bool) -> None:
    """Replaces vLLM's ``dispatch_cpu_unquantized_gemm``."""
    layer.cpu_linear = torch.nn.functional.linear
