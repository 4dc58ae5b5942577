"""Which layers of a CPU engine must multiply with their weight itself and not with a packed copy of it.

vLLM on a CPU packs a linear layer's weight after the first load and multiplies with the copy from then on.
An engine in RLHF receives new weights after each training step, so the copy is stale after the first one
(``lm_head`` and embeddings keep ``weight``: silently wrong) or there is nothing left to load into (all other
layers: ``weight`` is replaced by an empty tensor).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MATRIX = 2


def keep(layer: "torch.nn.Module") -> bool:
    """True for a linear layer (``weight`` of out x in); weights of other ranks stay upstream's business."""
    weight = layer.weight
    return bool(weight.ndim == MATRIX)
