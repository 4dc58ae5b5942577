"""What a forward pass keeps for its backward pass on one GPU, and the most that a pass needs at a time.

All numbers are bytes, for a Hugging Face decoder in 16 bits with a gated MLP and RMS norms, whose logits
OpenRLHF turns into 32-bit log-probabilities. What is saved is compared with torch's own saved tensors by
``tests/image/test_memory.py``.
"""

from dataclasses import dataclass

from rlhf_stack.memory.model_shape import Shape
from rlhf_stack.memory.training import BYTES_16BIT, BYTES_32BIT

EAGER = "eager"


@dataclass(frozen=True)
class Pass:
    """One micro batch on a GPU: ``sequences`` of ``length`` tokens each.

    ``checkpointing`` keeps the input of each layer alone. ``split`` ranks share each sequence (ring
    attention) or each layer (tensor parallelism). ``value_head``: a number for each token and no logits.
    ``half_precision_logits``: they stay in 16 bits (OpenRLHF 0.5).
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
        """Tokens on this GPU at a time."""
        return -(-self.sequences * self.length // self.split)


def saved_activations(shape: Shape, work: Pass) -> int:
    """What is kept between the forward and the backward pass."""
    layer = _boundary(shape, work) if work.checkpointing else _layer(shape, work)
    return shape.layers * layer + _norm(shape, work) + _boundary(shape, work) + _head(shape, work)


def training_peak(shape: Shape, work: Pass) -> int:
    """The most that forward and backward pass need at a time beside the states of the model.

    It is reached either where the gradient of the logits is made, or in a layer that is computed again.
    """
    logits = 0 if work.value_head else work.tokens * shape.vocabulary
    head = logits * (3 * BYTES_16BIT if work.half_precision_logits else 3 * BYTES_32BIT)
    again = _layer(shape, work) if work.checkpointing else 0
    gradient = work.tokens * BYTES_16BIT * (2 * shape.mlp_width + shape.hidden)
    return saved_activations(shape, work) + max(head, again + gradient - _head(shape, work))


def forward_peak(shape: Shape, work: Pass) -> int:
    """The most that a pass without gradients needs at a time."""
    logits = 0 if work.value_head else work.tokens * shape.vocabulary
    head = logits * (2 * BYTES_16BIT if work.half_precision_logits else 2 * BYTES_32BIT)
    layer = work.tokens * BYTES_16BIT * (3 * shape.mlp_width + 5 * shape.hidden)
    return max(head, layer + _scores(shape, work))


def _boundary(shape: Shape, work: Pass) -> int:
    """The hidden numbers between two layers."""
    return BYTES_16BIT * work.tokens * shape.hidden


def _norm(shape: Shape, work: Pass) -> int:
    """An RMS norm: its input in 32 bits and what it made of it in 16, and a number for each token."""
    return work.tokens * ((BYTES_32BIT + BYTES_16BIT) * shape.hidden + BYTES_32BIT)


def _layer(shape: Shape, work: Pass) -> int:
    """All that one layer keeps."""
    tokens, queries, keys = work.tokens, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = 2 * (_norm(shape, work) + _boundary(shape, work))
    attention = BYTES_16BIT * tokens * (2 * queries + 2 * keys) + BYTES_32BIT * tokens * shape.heads
    if shape.head_norm:
        attention += (BYTES_32BIT + BYTES_16BIT) * tokens * (queries + keys)
    mlp = BYTES_16BIT * tokens * 4 * shape.mlp_width
    return norms + attention + mlp + _scores(shape, work)


def _scores(shape: Shape, work: Pass) -> int:
    """The table of scores that only eager attention keeps: in 32 bits and again in 16."""
    if work.attention != EAGER:
        return 0
    return (BYTES_32BIT + BYTES_16BIT) * work.sequences * shape.heads * work.length**2 // work.split


def _head(shape: Shape, work: Pass) -> int:
    """The logits, or a number for each token."""
    if work.value_head:
        return BYTES_32BIT * work.tokens
    return work.tokens * shape.vocabulary * (BYTES_16BIT if work.half_precision_logits else BYTES_32BIT)
