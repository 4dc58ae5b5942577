"""What a vLLM engine takes on each of its GPUs, and the cache of keys and values that is left."""

from dataclasses import dataclass

from rlhf_stack.memory.model_shape import Shape
from rlhf_stack.memory.training import BYTES_16BIT, BYTES_32BIT, shard_size

BLOCK = 16  # tokens of a block of vLLM's cache on a GPU
BATCHED = 8192  # tokens that vLLM tries at its start, to see what it needs for them
SEQUENCES = 256  # sequences that it samples for at a time


@dataclass(frozen=True)
class EngineSettings:
    """An engine over ``size`` GPUs that takes ``utilization`` of each GPU's memory, for ``length`` tokens."""

    size: int
    utilization: float
    length: int
    block: int = BLOCK


@dataclass(frozen=True)
class KvCache:
    """On each GPU of the engine, in bytes; ``tokens`` and ``concurrency`` are of the whole engine.

    ``concurrency`` is how many sequences of full length there is room for at a time.
    """

    budget: int
    weights: int
    working: int
    cache: int
    tokens: int
    concurrency: float

    @property
    def fits(self) -> bool:
        """Whether one sequence of full length does."""
        return self.concurrency >= 1


def token_bytes(shape: Shape, size: int) -> int:
    """Bytes of one token in the cache of one GPU: heads are split, and copied where there are too few."""
    return 2 * BYTES_16BIT * shape.layers * max(1, shard_size(shape.kv_heads, size)) * shape.head_dim


def engine_weights(shape: Shape, size: int) -> int:
    """Bytes of weights on one of ``size`` GPUs: matrices are split, norms are whole."""
    norms = shape.hidden * (2 * shape.layers + 1)
    return BYTES_16BIT * (shard_size(shape.total - norms, size) + norms)


def blocks(shape: Shape, engine: EngineSettings, cache: int) -> int:
    """Blocks of the cache that ``cache`` bytes on each GPU hold."""
    return max(0, cache) // (token_bytes(shape, engine.size) * engine.block)


def working(shape: Shape, engine: EngineSettings) -> int:
    """What vLLM needs for its largest step: the widest layer, and the logits that it samples from."""
    tokens = max(BATCHED, engine.length)
    wide = BYTES_16BIT * tokens * (4 * shape.hidden + shard_size(3 * shape.mlp_width, engine.size))
    return wide + BYTES_32BIT * 2 * SEQUENCES * shape.vocabulary


def kv_cache(shape: Shape, engine: EngineSettings, gpu_memory: int) -> KvCache:
    """The cache of one engine on GPUs of ``gpu_memory`` bytes."""
    budget = int(engine.utilization * gpu_memory)
    weights, needed = engine_weights(shape, engine.size), working(shape, engine)
    cache = max(0, budget - weights - needed)
    tokens = blocks(shape, engine, cache) * engine.block
    return KvCache(budget, weights, needed, cache, tokens, tokens / engine.length)
