"""Estimates the activation memory of a pass on one GPU: saved for the backward pass, and at its peak.

All results are bytes, for a 16-bit Hugging Face decoder with a gated MLP and RMS norms whose
log-probabilities are computed in 32 bits. ``tests/image/test_memory.py`` compares them with torch's
allocations.
"""

from dataclasses import dataclass

from rlhf_stack.memory.model_shape import Shape
from rlhf_stack.memory.training import BYTES_16BIT, BYTES_32BIT

EAGER = "eager"
LOGIT_ROWS = 1024  # tokens whose log-probabilities are computed at a time


@dataclass(frozen=True)
class Pass:
    """A pass of one micro batch on a GPU: ``sequences`` of ``length`` tokens each.

    ``checkpointing``: only the input of each layer is saved. ``split``: ranks that share each sequence (ring
    attention) or each layer (tensor parallelism). ``value_head``: the output is a scalar per token instead of
    logits. ``half_precision_logits``: the logits stay in 16 bits, except those of `LOGIT_ROWS` tokens
    (OpenRLHF 0.5).
    """

    sequences: int
    length: int
    checkpointing: bool = False
    attention: str = "sdpa"
    split: int = 1
    value_head: bool = False
    half_precision_logits: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of the micro batch on this GPU."""
        return -(-self.sequences * self.length // self.split)


def saved_activations(shape: Shape, work: Pass) -> int:
    """Bytes saved from the forward pass for the backward pass."""
    layer = _boundary(shape, work) if work.checkpointing else _layer(shape, work)
    return shape.layers * layer + _norm(shape, work) + _boundary(shape, work) + _head(shape, work)


def training_peak(shape: Shape, work: Pass) -> int:
    """Peak bytes of forward and backward pass, without the model states.

    The peak is either at the gradient of the logits or in the recomputation of a layer.
    """
    logits, block = _logits(shape, work), _block(shape, work)
    head = logits + (max(logits, block) if work.half_precision_logits else logits + block)
    recomputed = _layer(shape, work) if work.checkpointing else 0
    in_mlp = max(2 * shape.mlp_width, shape.routed) + shape.routed
    gradient = work.tokens * BYTES_16BIT * (in_mlp + shape.hidden)
    return saved_activations(shape, work) + max(head, recomputed + gradient - _head(shape, work))


def forward_peak(shape: Shape, work: Pass) -> int:
    """Peak bytes of a pass without gradients."""
    logits, block = _logits(shape, work), _block(shape, work)
    in_16_bits = 0 if work.half_precision_logits else logits // 2  # what 32-bit logits are converted from
    head = logits + max(in_16_bits, block)
    in_mlp = 3 * max(shape.mlp_width, shape.routed) + shape.routed
    layer = work.tokens * BYTES_16BIT * (in_mlp + 4 * shape.hidden)
    return max(head, layer + _scores(shape, work))


def _block(shape: Shape, work: Pass) -> int:
    """The exponentials of 32-bit logits, which exist for `LOGIT_ROWS` tokens at a time."""
    if work.value_head:
        return 0
    tokens = -(-work.length // work.split) if work.half_precision_logits else work.tokens
    return BYTES_32BIT * min(tokens, LOGIT_ROWS) * shape.vocabulary


def _boundary(shape: Shape, work: Pass) -> int:
    """The hidden states between two layers."""
    return BYTES_16BIT * work.tokens * shape.hidden


def _norm(shape: Shape, work: Pass) -> int:
    """The tensors of an RMS norm: input in 32 bits, output in 16 bits, one scalar per token."""
    return work.tokens * ((BYTES_32BIT + BYTES_16BIT) * shape.hidden + BYTES_32BIT)


def _layer(shape: Shape, work: Pass) -> int:
    """The saved tensors of one layer; experts save their inputs and outputs, one for each use of a token."""
    tokens, queries, keys = work.tokens, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = 2 * (_norm(shape, work) + _boundary(shape, work))
    attention = BYTES_16BIT * tokens * (2 * queries + 2 * keys) + BYTES_32BIT * tokens * shape.heads
    if shape.head_norm:
        attention += (BYTES_32BIT + BYTES_16BIT) * tokens * (queries + keys)
    mlp = BYTES_16BIT * tokens * (4 * shape.mlp_width + 2 * shape.routed)
    return norms + attention + mlp + _scores(shape, work)


def _scores(shape: Shape, work: Pass) -> int:
    """The attention scores, which only eager attention saves: in 32 bits and in 16 bits."""
    if work.attention != EAGER:
        return 0
    return (BYTES_32BIT + BYTES_16BIT) * work.sequences * shape.heads * work.length**2 // work.split


def _head(shape: Shape, work: Pass) -> int:
    """The logits, or one scalar per token."""
    return BYTES_32BIT * work.tokens if work.value_head else _logits(shape, work)


def _logits(shape: Shape, work: Pass) -> int:
    """The logits; a value head gives none."""
    if work.value_head:
        return 0
    return work.tokens * shape.vocabulary * (BYTES_16BIT if work.half_precision_logits else BYTES_32BIT)
