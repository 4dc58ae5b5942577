"""Layers of a CPU engine whose weight must not be packed.

vLLM on a CPU packs a linear layer's weight after the first load and multiplies with the packed copy. An RLHF
engine receives new weights after each training step. The copy is then stale (``lm_head`` and embeddings keep
``weight``: silently wrong), or the load fails (all other layers: ``weight`` becomes an empty tensor).
"""

from rlhf_stack.lazy import torch

MATRIX_NDIM = 2


def skip_weight_prepack(layer: "torch.nn.Module") -> bool:
    """Report whether ``layer`` is linear (``weight`` of shape out x in); upstream packs all others."""
    weight = layer.weight
    return bool(weight.ndim == MATRIX_NDIM)
