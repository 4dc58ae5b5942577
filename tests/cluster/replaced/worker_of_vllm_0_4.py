"""Replace the GPU of an engine's worker by its CPU; model runner, layers and sampler are vLLM 0.4.2's own.

A rank holds its shard of the model and computes with it. The ranks of an engine use the rendezvous of vLLM's
executor, and every layer needs all of them. Replaced are

* the kernels, by vLLM's own PyTorch versions, and attention by `attention_of_vllm_0_4`;
* NCCL and vLLM's own all-reduce, by gloo; and the broadcast of a step's input, which refuses CPU tensors;
* memory queries: the cache has `BLOCKS` blocks, and the machine `MEMORY` bytes, because vLLM requires several
  GiB of swap space per GPU of an engine. Nothing is swapped.
"""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from attention_of_vllm_0_4 import Backend
from rlhf_stack.telemetry import events
from vllm import config
from vllm.attention import layer as attention_layer
from vllm.distributed import (
    ensure_model_parallel_initialized,
    get_tensor_model_parallel_cpu_group,
    init_distributed_environment,
    tensor_model_parallel_gather,
)
from vllm.model_executor import sampling_metadata, set_random_seed
from vllm.model_executor.layers import logits_processor
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.worker import cache_engine, model_runner, worker

BLOCKS = 1024  # of 16 tokens
MEMORY = 1 << 40


class CpuWorker(worker.Worker):
    """vLLM's GPU worker; it overrides the methods that reach the device."""

    def __init__(self, *, device_config, **options):
        device_config.device = torch.device("cpu")  # its type is unchanged: it selected the executor
        super().__init__(device_config=device_config, **options)

    def init_device(self):
        torch.cuda.current_device = lambda: self.local_rank
        torch.cuda.get_device_properties = lambda _: SimpleNamespace()  # rlhf_stack reads a UUID
        self.device = self.device_config.device
        init_distributed_environment(
            self.parallel_config.world_size,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            backend="gloo",
        )
        ensure_model_parallel_initialized(
            self.parallel_config.tensor_parallel_size, self.parallel_config.pipeline_parallel_size
        )
        dist.all_reduce(torch.zeros(1))
        set_random_seed(self.model_config.seed)

    def determine_num_available_blocks(self):
        return BLOCKS, 0

    def execute_model(self, *arguments, **options):
        """Run a step, and record as an event that this rank did, with the sum of its absolute weights."""
        output = super().execute_model(*arguments, **options)
        parameters = self.model_runner.model.parameters()
        weights = sum(float(weight.abs().sum(dtype=torch.float64)) for weight in parameters)
        events.emit("engine step", rank=self.rank, weights=weights)
        return output


class NoMemoryProfiler:
    """Replaces vLLM's profiler of the GPU memory that loading allocates."""

    consumed_memory = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class CpuCacheEngine(cache_engine.CacheEngine):
    def _allocate_kv_cache(self, num_blocks, device):
        assert device in ("cuda", "cpu")
        return super()._allocate_kv_cache(num_blocks, "cpu")


def broadcast(tensor_dict=None, src=0):
    """Replaces vLLM's ``broadcast_tensor_dict``."""
    if dist.get_world_size() == 1:
        return tensor_dict
    objects = [tensor_dict]
    dist.broadcast_object_list(objects, src=src, group=get_tensor_model_parallel_cpu_group())
    return objects[0]


def gather_logits(logits, *arguments):
    """Replaces vLLM's ``tensor_model_parallel_gather``: gloo's threads may not write to inference tensors."""
    with torch.inference_mode(mode=False):
        return tensor_model_parallel_gather(logits.clone(), *arguments)


def rotary_forward(self, positions, query, key, offsets=None):
    """Replaces ``RotaryEmbedding.forward``: vLLM's PyTorch version expects a batch of sequences."""
    query, key = self._forward(positions[None], query[None], key[None], offsets)
    return query[0], key[0]


def install():
    """Replace the functions and classes in this process."""
    config.get_cpu_memory = lambda: MEMORY
    worker.Worker, worker.CacheEngine = CpuWorker, CpuCacheEngine
    model_runner.CudaMemoryProfiler = NoMemoryProfiler
    worker.broadcast_tensor_dict = model_runner.broadcast_tensor_dict = broadcast
    logits_processor.tensor_model_parallel_gather = gather_logits
    for module in (model_runner, cache_engine, attention_layer):
        module.get_attn_backend = lambda _dtype: Backend
    for module in (model_runner, cache_engine, sampling_metadata):
        module.is_pin_memory_available = lambda: False
    RMSNorm.forward, SiluAndMul.forward = RMSNorm._forward, SiluAndMul._forward
    RotaryEmbedding.forward = rotary_forward
