"""How many bytes a run needs on each GPU and on its host: pure functions of shapes, lengths and settings."""

from rlhf_stack.memory.activations import Pass, forward_peak, saved, training_peak
from rlhf_stack.memory.engine import Engine, KvCache, kv_cache
from rlhf_stack.memory.model_shape import Shape, ShapeError, read_shape, typed_shape
from rlhf_stack.memory.training import States, Zero, states

__all__ = [
    "Engine",
    "KvCache",
    "Pass",
    "Shape",
    "ShapeError",
    "States",
    "Zero",
    "forward_peak",
    "kv_cache",
    "read_shape",
    "saved",
    "states",
    "training_peak",
    "typed_shape",
]
