"""Estimates the bytes that a run needs on each GPU and host: pure functions of shapes, lengths and settings.

May import only ``config``, ``inputs`` and ``errors``.
"""

from rlhf_stack.memory.activations import (
    LOGIT_ROWS,
    Pass,
    forward_peak,
    saved_activations,
    training_peak,
)
from rlhf_stack.memory.engine import (
    BATCHED,
    EngineSettings,
    KvCache,
    kv_cache,
    reload_memory,
    sync_memory,
)
from rlhf_stack.memory.model_shape import Shape, ShapeError, parse_shape, read_shape
from rlhf_stack.memory.training import Zero, model_states
