"""flash_attn 2's attention functions: its own where it is installed, xformers' on a GPU, exact ones on a CPU.

transformers 4.46 calls them. xformers 0.0.26 contains all of FlashAttention 2.5.6: its compiled functions,
and the Python file that calls them, which only expects the compiled module under another name.
"""

import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from rlhf_stack.compat import flash_attention

if TYPE_CHECKING:
    import torch

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "unpad_input"]

COMPILED = "flash_attn_2_cuda"  # flash_attn's own name for its compiled module
UNLIMITED = -1


@cache
def xformers_interface() -> ModuleType:
    """flash_attn's file of functions from xformers, on the compiled module of xformers."""
    import torch  # noqa: F401  (the compiled module needs its libraries)
    from xformers import _C_flashattention

    sys.modules.setdefault(COMPILED, _C_flashattention)
    file = Path(_C_flashattention.__file__).parent / "_flash_attn" / "flash_attn_interface.py"
    spec = importlib.util.spec_from_file_location("rlhf_stack_flash_attn_interface", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


try:
    from flash_attn import flash_attn_func, flash_attn_varlen_func
    from flash_attn.bert_padding import unpad_input
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] != "flash_attn":
        raise

    def unpad_input(
        states: "torch.Tensor", mask: "torch.Tensor"
    ) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]":
        """`flash_attention.unpad_input` without the lengths, as in the releases before 2.7."""
        tokens, indices, offsets, longest, _ = flash_attention.unpad_input(states, mask)
        return tokens, indices, offsets, longest

    def flash_attn_func(
        q: "torch.Tensor",
        k: "torch.Tensor",
        v: "torch.Tensor",
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Sequence[int] = (UNLIMITED, UNLIMITED),
        **options: Any,
    ) -> "torch.Tensor":
        """Attention of ``q`` (batch, length, heads, head size) to ``k`` and ``v``, which may have fewer."""
        _refuse(q.is_cuda, dropout_p, options)
        if q.is_cuda:
            function = xformers_interface().flash_attn_func
            options |= {"softmax_scale": softmax_scale, "causal": causal, "window_size": tuple(window_size)}
            return cast("torch.Tensor", function(q, k, v, dropout_p, **options))
        from torch import stack

        rows = zip(q, k, v, strict=True)
        return stack([_exact(*row, softmax_scale, causal, window_size) for row in rows])

    def flash_attn_varlen_func(
        q: "torch.Tensor",
        k: "torch.Tensor",
        v: "torch.Tensor",
        cu_seqlens_q: "torch.Tensor",
        cu_seqlens_k: "torch.Tensor",
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Sequence[int] = (UNLIMITED, UNLIMITED),
        **options: Any,
    ) -> "torch.Tensor":
        """The same for sequences in a row, (tokens, heads, head size), with int32 offsets of each."""
        _refuse(q.is_cuda, dropout_p, options)
        if q.is_cuda:
            function = xformers_interface().flash_attn_varlen_func
            lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
            options |= {"softmax_scale": softmax_scale, "causal": causal, "window_size": tuple(window_size)}
            return cast("torch.Tensor", function(q, k, v, *lengths, dropout_p, **options))
        from torch import cat

        of_q, of_k = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        sequences = zip(q.split(of_q), k.split(of_k), v.split(of_k), strict=True)
        return cat([_exact(*each, softmax_scale, causal, window_size) for each in sequences])

    def _refuse(is_compiled: bool, dropout: float, options: dict[str, Any]) -> None:
        """Raise for what the exact functions would ignore, and for softcap, which the compiled ones lack."""
        given = [name for name, value in options.items() if value is not None and value is not False]
        given += ["dropout_p"] if dropout else []
        refused = [name for name in given if name == "softcap" or not is_compiled]
        if refused:
            where = "of xformers" if is_compiled else "on a CPU"
            raise NotImplementedError(
                f"FlashAttention {where}, without flash_attn, does not compute {', '.join(refused)}: "
                "leave out --flash_attn and --packing_samples"
            )

    def _exact(
        q: "torch.Tensor",
        k: "torch.Tensor",
        v: "torch.Tensor",
        scale: float | None,
        causal: bool,
        window: Sequence[int],
    ) -> "torch.Tensor":
        """Attention of one sequence, (length, heads, head size); a query that may attend to nothing gives 0.

        The last query is aligned with the last key. ``window`` is the distance to the left and to the right.
        """
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        groups = q.shape[1] // k.shape[1]
        k, v = (tensor.repeat_interleave(groups, dim=1) for tensor in (k, v))
        left, right = window[0], 0 if causal else window[1]
        places = torch.arange(len(q), device=q.device).unsqueeze(1) + len(k) - len(q)
        distance = places - torch.arange(len(k), device=q.device)
        allowed = torch.ones_like(distance, dtype=torch.bool)
        if left != UNLIMITED:
            allowed &= distance <= left
        if right != UNLIMITED:
            allowed &= -distance <= right
        nothing = ~allowed.any(dim=1, keepdim=True)
        q, k, v = (tensor.transpose(0, 1) for tensor in (q, k, v))
        answer = scaled_dot_product_attention(q, k, v, attn_mask=allowed | nothing, scale=scale)
        return answer.masked_fill(nothing, 0).transpose(0, 1)
