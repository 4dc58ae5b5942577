"""Attention over packed and padded samples where flash-attn is not installed.

``flash_attention_2`` is OpenRLHF's default and what ``--ds.packing_samples`` requires. Where the package
flash_attn is absent, models are loaded with the implementation `NAME` instead: torch's own FlashAttention
(``torch.nn.attention.varlen``) on a GPU, exact attention for one sequence at a time on a CPU. Sequences in
one row are separated by their position ids. With a mask of ones, transformers' SDPA and FlashAttention let
them attend to each other; this does not.
"""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rlhf_stack.compat import attention_provider
from rlhf_stack.memory.families import RECURRENT
from rlhf_stack.telemetry import run_log

if TYPE_CHECKING:
    import torch

NAME = "rlhf_stack_varlen"
FLASH_ATTENTION = "flash_attention_2"
REMEDY = "build an image with flash-attn (`python -m scripts build CELL --with flash-attn`), or use"


class UnsupportedAttentionError(RuntimeError):
    """The model needs a feature of attention that only flash-attn or eager attention has."""


@dataclass(frozen=True)
class _Sequences:
    """The sequences of a batch without padding.

    ``unpadded`` are the indices of their tokens in the flattened batch, ``starts`` are int32 offsets into
    those tokens with their number at the end (``cu_seqlens``), ``lengths`` are the differences of the starts.
    """

    unpadded: "torch.Tensor"
    starts: "torch.Tensor"
    lengths: list[int]


@dataclass(frozen=True)
class _Layer:
    """Inputs of a layer: tokens (total, heads, head size); ``window`` counts the token itself."""

    query: "torch.Tensor"
    key: "torch.Tensor"
    value: "torch.Tensor"
    sequences: _Sequences
    scale: float | None
    window: int | None
    causal: bool

    @property
    def grouped(self) -> bool:
        """Whether several heads of ``query`` share one of ``key`` and ``value``."""
        return bool(self.query.shape[1] != self.key.shape[1])


def implementation(requested: str) -> str:
    """The attention implementation to load a model with, for the one that ``requested`` names.

    ``flash_attention_2`` becomes `NAME` where flash_attn is not installed; any other is unchanged.
    """
    if requested != FLASH_ATTENTION or find_spec("flash_attn") is not None:
        return requested
    _register()
    return NAME


def check_model(model: "torch.nn.Module", packed: bool) -> None:
    """Refuse a model that would train with other attention than it was made with.

    One that transformers does not let use FlashAttention passes what `forward` would ignore (indices of
    sparse attention, chunks); transformers checks only the names of its own implementations. If samples are
    ``packed``, layers that pass a state from token to token (linear attention, Mamba) would pass it from one
    sample to the next, also with flash_attn: their kernels do not get the samples' lengths.
    """
    from transformers import PreTrainedModel

    for part in (part for part in model.modules() if isinstance(part, PreTrainedModel)):
        # Not all models with such layers are "stateful".
        kinds = RECURRENT.intersection(getattr(part.config, "layer_types", None) or ())
        if packed and (part._is_stateful or kinds):
            raise UnsupportedAttentionError(
                f"{type(part).__name__} passes a state from token to token, which samples that are packed "
                "into one row would share: leave out --ds.packing_samples and --train.dynamic_batch_enable"
            )
        if part.config._attn_implementation == NAME and not part._supports_flash_attn:
            raise UnsupportedAttentionError(
                f"{type(part).__name__} does not support FlashAttention: use --ds.attn_implementation "
                "sdpa or eager, without packing"
            )


@cache
def _register() -> None:
    """Make `NAME` known to transformers, and log once that it is used."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

    AttentionInterface.register(NAME, forward)
    AttentionMaskInterface.register(NAME, flash_attention_mask)
    how = f"{attention_provider.provider()} ({NAME})"
    run_log.info(f"flash_attn is not installed: {FLASH_ATTENTION} is served by {how}")


def forward(
    module: Any,
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    attention_mask: "torch.Tensor | None",
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    position_ids: "torch.Tensor | None" = None,
    **options: Any,
) -> "tuple[torch.Tensor, None]":
    """One attention layer, as transformers' ``AttentionInterface`` calls it.

    ``query`` is (batch, heads, length, head size), ``key`` and ``value`` may have fewer heads;
    ``attention_mask`` is None or (batch, length) with 0 at padding. Returns (batch, length, heads, head size)
    with 0 at padding.
    """
    import torch

    _refuse(query, key, attention_mask, dropout, options)
    batch, heads, length, _ = query.shape
    sequences = _sequences_of_pass(batch, length, attention_mask, position_ids, query.device)
    causal = module.is_causal if is_causal is None else is_causal
    dtype = _half_precision(module) if query.is_cuda and query.dtype == torch.float32 else query.dtype
    q, k, v = (
        tensor.transpose(1, 2).flatten(0, 1)[sequences.unpadded].to(dtype) for tensor in (query, key, value)
    )
    attend = _attend_on_gpu if query.is_cuda else _attend_one_by_one
    answer = attend(_Layer(q, k, v, sequences, scaling, sliding_window, causal)).to(query.dtype)
    output = answer.new_zeros(batch * length, heads, value.shape[-1])
    return output.index_copy(0, sequences.unpadded, answer).unflatten(0, (batch, length)), None


def _refuse(
    query: "torch.Tensor",
    key: "torch.Tensor",
    attention_mask: "torch.Tensor | None",
    dropout: float,
    options: dict[str, Any],
) -> None:
    """Raise for a feature that neither path computes, because it would be silently ignored."""
    unsupported = {
        "dropout in attention": dropout > 0,
        "softcapping of attention scores": options.get("softcap") is not None,
        "attention sinks": options.get("s_aux") is not None,
        "a cache of keys and values": key.shape[2] != query.shape[2],
        "a mask per pair of tokens": attention_mask is not None and attention_mask.dim() != 2,
    }
    found = [feature for feature, needed in unsupported.items() if needed]
    if found:
        raise UnsupportedAttentionError(
            f"this model needs {' and '.join(found)}, which {NAME} does not compute: {REMEDY} "
            "--ds.attn_implementation eager without packing"
        )


def _half_precision(module: Any) -> "torch.dtype":
    """The dtype of the model's weights, which that of the queries is not after a layer norm in float32."""
    import torch

    if getattr(module.config, "_is_quantized", False):
        return module.config.dtype  # weights are stored as uint8
    dtype = next(layer for layer in module.modules() if isinstance(layer, torch.nn.Linear)).weight.dtype
    if dtype == torch.float32:
        raise UnsupportedAttentionError(
            f"the model has float32 weights; FlashAttention computes in bf16 and fp16 alone: {REMEDY} "
            "--ds.param_dtype bf16"
        )
    return dtype


@dataclass(frozen=True)
class _Pass:
    """What the sequences of a forward pass were computed from, besides the tensor that they are kept with."""

    state: tuple[Any, ...]
    other: "torch.Tensor | None"
    sequences: _Sequences


@cache
def _passes() -> Any:
    """The sequences of the passes whose mask or position ids are alive, by the identity of that tensor."""
    from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

    return WeakIdKeyDictionary(ref_type=WeakIdRef)


def _sequences_of_pass(
    batch: int,
    length: int,
    attention_mask: "torch.Tensor | None",
    position_ids: "torch.Tensor | None",
    device: "torch.device",
) -> _Sequences:
    """`_sequences`, computed in the first layer of a forward pass: on a GPU each computation synchronizes.

    It is kept while the mask is alive, or without one the position ids, and computed again if one changes.
    """
    key = position_ids if attention_mask is None else attention_mask
    inputs = [tensor for tensor in (attention_mask, position_ids) if tensor is not None]
    if key is None or any(tensor.is_inference() for tensor in inputs):  # these do not count their changes
        return _sequences(batch, length, attention_mask, position_ids, device)
    state = (batch, length, device, [tensor._version for tensor in inputs])
    other = None if attention_mask is None else position_ids  # kept alive, so that its identity is its own
    known: _Pass | None = _passes().get(key)
    if known is None or known.state != state or known.other is not other:
        known = _Pass(state, other, _sequences(batch, length, attention_mask, position_ids, device))
        _passes()[key] = known
    return known.sequences


def _sequences(
    batch: int,
    length: int,
    attention_mask: "torch.Tensor | None",
    position_ids: "torch.Tensor | None",
    device: "torch.device",
) -> _Sequences:
    """The tokens that are not padding, row by row, and the sequences that they form.

    A sequence starts with each row, and where a position does not follow from the one before it.
    """
    import torch

    rows = torch.arange(batch, device=device).repeat_interleave(length)
    if attention_mask is None:
        unpadded = torch.arange(batch * length, device=device)
    else:
        unpadded = attention_mask.flatten().nonzero().flatten()
    first = rows[unpadded].diff(prepend=rows.new_tensor([-1])) != 0
    if position_ids is not None and position_ids.dim() == 2:  # M-RoPE has three, and no packing
        positions = position_ids.expand(batch, length).flatten()[unpadded]
        first |= positions.diff(prepend=positions.new_tensor([-2])) != 1
    starts = first.nonzero().flatten().to(torch.int32)
    starts = torch.cat([starts, starts.new_tensor([len(unpadded)])])
    return _Sequences(unpadded, starts, starts.diff().tolist())


def _attend_on_gpu(layer: _Layer) -> "torch.Tensor":
    """FlashAttention of torch; a head size of ``value`` that differs (MLA) is padded to that of ``query``."""
    import torch
    from torch.nn.attention.varlen import varlen_attn

    head_size, size = layer.query.shape[-1], layer.value.shape[-1]
    starts, longest = layer.sequences.starts, max(layer.sequences.lengths)
    left = -1 if layer.window is None else layer.window - 1
    return varlen_attn(
        layer.query,
        layer.key,
        torch.nn.functional.pad(layer.value, (0, head_size - size)),
        starts,
        starts,
        longest,
        longest,
        scale=head_size**-0.5 if layer.scale is None else layer.scale,
        window_size=(left, 0 if layer.causal else left),
        enable_gqa=layer.grouped,
    )[..., :size]


def _attend_one_by_one(layer: _Layer) -> "torch.Tensor":
    """Exact attention for each sequence; memory grows with the square of the longest, not of the batch."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    answers = []
    split = (tensor.split(layer.sequences.lengths) for tensor in (layer.query, layer.key, layer.value))
    for sequence in zip(*split, strict=True):
        q, k, v = (tensor.transpose(0, 1) for tensor in sequence)
        mask = None
        if layer.window is not None and layer.window < q.shape[1]:
            distance = torch.arange(q.shape[1]).unsqueeze(1) - torch.arange(q.shape[1])
            near = distance < layer.window
            mask = near & (distance >= 0) if layer.causal else distance.abs() < layer.window
        answer = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=layer.causal and mask is None,
            scale=layer.scale,
            enable_gqa=layer.grouped,
        )
        answers.append(answer.transpose(0, 1))
    return torch.cat(answers)
