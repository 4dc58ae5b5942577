"""Estimates the memory of a vLLM engine on each of its GPUs, and the size of its KV cache."""

from dataclasses import dataclass

from rlhf_stack.memory.model_shape import Shape
from rlhf_stack.memory.training import BYTES_16BIT, BYTES_32BIT, shard_size

BLOCK = 16  # tokens per block of vLLM's KV cache on a GPU
# Tokens of an engine's largest step. OpenRLHF's engines of vLLM 0.29 take 2048 at a time, also of a longer
# prompt; the rest stands for CUDA graphs, which leave less room for the cache too.
BATCHED = 8192
BUFFERS = 2  # `rlhf_stack.sync.group.SLOTS`
VOCABULARY = 64  # its padding is a multiple of this
SEQUENCES = 256  # sequences that it samples in one step


@dataclass(frozen=True)
class EngineSettings:
    """An engine over ``size`` GPUs that uses the fraction ``utilization`` of each.

    Its sequences have up to ``length`` tokens, its steps up to ``step``.
    """

    size: int
    utilization: float
    length: int
    block: int = BLOCK
    step: int = BATCHED


@dataclass(frozen=True)
class KvCache:
    """The memory of an engine in bytes per GPU, and the ``tokens`` that fit in the cache of the engine.

    ``concurrency`` is the number of full-length sequences that fit.
    """

    budget: int
    weights: int
    working: int
    cache: int
    tokens: int
    concurrency: float

    @property
    def fits(self) -> bool:
        """Whether one full-length sequence fits."""
        return self.concurrency >= 1


def token_bytes(shape: Shape, size: int) -> int:
    """Bytes per token in the cache of one GPU; KV heads are split, or replicated if fewer than GPUs.

    What latent attention caches is replicated.
    """
    layers = shape.cached_layers or shape.layers
    if shape.latent:
        return BYTES_16BIT * layers * shape.latent
    return 2 * BYTES_16BIT * layers * max(1, shard_size(shape.kv_heads, size)) * shape.head_dim


def engine_weights(shape: Shape, size: int) -> int:
    """Bytes of weights on one of ``size`` GPUs: matrices are split, norms are replicated."""
    norms = shape.hidden * (2 * shape.layers + 1)
    return BYTES_16BIT * (shard_size(shape.total - norms, size) + norms)


def blocks(shape: Shape, engine: EngineSettings, cache: int) -> int:
    """Number of cache blocks in ``cache`` bytes per GPU."""
    return max(0, cache) // (token_bytes(shape, engine.size) * engine.block)


def working(shape: Shape, engine: EngineSettings) -> int:
    """Bytes of vLLM's largest step: the widest layer, and the logits for sampling."""
    wide = BYTES_16BIT * engine.step * (4 * shape.hidden + shard_size(3 * shape.mlp_width, engine.size))
    return wide + BYTES_32BIT * 2 * SEQUENCES * shape.vocabulary


def sync_memory(shape: Shape, bucket: int) -> int:
    """Bytes of a weight sync on each GPU, released after it: two buckets, and the largest parameter.

    A parameter larger than ``bucket`` bytes arrives in several buckets and is assembled before it is loaded.
    """
    largest = BYTES_16BIT * shape.largest
    return BUFFERS * bucket + (largest if largest > bucket else 0)


def reload_memory(shape: Shape, size: int, bucket: int) -> int:
    """Bytes of vLLM's layer-wise reload on each of ``size`` GPUs, next to `sync_memory`; released after it.

    A copy of a bucket, and the largest layer twice: its shard of what has arrived, and what is loaded from
    that; experts once more, when they are rearranged. A padded embedding is incomplete until the end.
    """
    embedding = shard_size(shape.embedding, size)
    waiting = embedding * (1 if shape.tied else 2) if shape.vocabulary % VOCABULARY else 0
    matrix = shape.hidden * shape.intermediate
    queries = shape.hidden * shape.head_dim * (shape.heads + 2 * shape.kv_heads)
    layer = 3 * shard_size(3 * matrix * shape.experts, size)
    layer = max(layer, 2 * shard_size(max(2 * matrix, queries), size))
    return bucket + BYTES_16BIT * max(waiting + layer, (waiting or embedding) + embedding)


def kv_cache(shape: Shape, engine: EngineSettings, gpu_memory: int) -> KvCache:
    """The memory and KV cache of an engine on GPUs of ``gpu_memory`` bytes."""
    budget = int(engine.utilization * gpu_memory)
    weights, needed = engine_weights(shape, engine.size), working(shape, engine)
    cache = max(0, budget - weights - needed)
    tokens = blocks(shape, engine, cache) * engine.block
    return KvCache(budget, weights, needed, cache, tokens, tokens / engine.length)
