"""A device for vLLM 0.29's wheel for GPUs where there is no GPU: its engines generate on the CPU.

vLLM finds it as it finds any vendor's, by entry points, in every process. What is replaced:

* the operators. vLLM's extension for CPUs is not in the wheel, that for GPUs does not load without a driver:
  `operators_of_vllm_0_29` has in torch the few that are called here;
* the platform. It is vLLM's own for CPUs, whose worker and model runner are subclasses of those for GPUs,
  with the properties by which Ray's executor knows a GPU. NCCL is gloo, sleep frees nothing, and each worker
  has `CACHE` bytes for its cache, in place of what a GPU has left, where no variable says how many.

All else is vLLM's: engine core, scheduler, executors, rendezvous, the model in its tensor-parallel parts and
what loads their weights, the sampler. Not shown are CUDA graphs, the model runner V2 (it is Triton),
asynchronous scheduling, and what of `rlhf_stack` is another thing on a GPU: ordinals of devices, CUDA IPC.
"""

from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms.cpu import CpuPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CACHE = 64 << 20


class ReplacedDevice(CpuPlatform):
    """What is not as vLLM has it for CPUs."""

    # As in vLLM's CudaPlatformBase, whose module does not load without a driver.
    ray_device_key = "GPU"
    ray_noset_device_env_vars = ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]  # noqa: RUF012
    device_control_env_var = "CUDA_VISIBLE_DEVICES"

    @classmethod
    def import_kernels(cls) -> None:
        """The operators, defined as their module loads."""
        import operators_of_vllm_0_29  # noqa: F401

    def is_sleep_mode_available(self) -> bool:
        """As on CUDA; the worker says in the log that it does nothing."""
        return True

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """A CPU's configuration, with the executor that was asked for."""
        executor = vllm_config.parallel_config.distributed_executor_backend
        super().check_and_update_config(vllm_config)
        vllm_config.parallel_config.distributed_executor_backend = executor
        cache = vllm_config.cache_config
        cache.kv_cache_memory_bytes = cache.kv_cache_memory_bytes or CACHE
        vllm_config.compilation_config.custom_ops.append("-rotary_embedding")  # vLLM has it in torch too


def platform() -> str:
    """The entry point in ``vllm.platform_plugins``."""
    return f"{__name__}.{ReplacedDevice.__name__}"


def linear_layers() -> None:
    """The entry point in ``vllm.general_plugins``: linear layers multiply with their weight, as on a GPU.

    On some CPUs vLLM would pack the weight, by operators that are not here.
    """
    from vllm.model_executor.layers import utils

    utils.dispatch_cpu_unquantized_gemm = multiply_with_the_weight


def multiply_with_the_weight(layer: Any, remove_weight: bool) -> None:  # noqa: ARG001
    """In place of vLLM's function of these arguments."""
    layer.cpu_linear = torch.nn.functional.linear
