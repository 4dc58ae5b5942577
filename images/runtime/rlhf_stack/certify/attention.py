"""The rung ``attention``: this image's attention of packed samples against one sequence at a time."""

import importlib.util
import inspect
import math
from typing import TYPE_CHECKING, Any

from rlhf_stack.accelerator import devices
from rlhf_stack.certify.ladder import Found, NotClimbedError, Place
from rlhf_stack.certify.model import Measurement
from rlhf_stack.lazy import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    Packed = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

HEADS, SIZE, WINDOW = 8, 64, 48
LENGTHS = (5, 129, 1, 64, 33)
CASES = {"equal heads": (HEADS, None), "grouped queries": (2, None), "sliding window": (2, WINDOW)}
PARTS = ("output", "query's gradient", "key's gradient", "value's gradient")
# Of the largest element of the reference: bf16 has 8 bits, and its products are summed in 32.
TOLERANCE = {"torch.bfloat16": 0.02, "torch.float32": 1e-5}


def climb(place: Place) -> Found:
    """Compare output and gradients, for heads that are equal, grouped, and with a sliding window."""
    lengths = LENGTHS if place.small else tuple(16 * length for length in LENGTHS)
    device = devices.torch_device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    measurements, problems = [], []
    for name, (kv_heads, window) in CASES.items():
        torch.manual_seed(0)
        total = sum(lengths)
        shapes = ((total, HEADS, SIZE), (total, kv_heads, SIZE), (total, kv_heads, SIZE))
        inputs = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
        expected = _with_gradients(_reference(lengths, window), inputs, torch.float32)
        found = _with_gradients(_packed(lengths, window), inputs, dtype)
        for part, one, reference in zip(PARTS, found, expected, strict=True):
            error = float((one.float() - reference).abs().max() / reference.abs().max())
            if math.isfinite(error):  # JSON has no other numbers
                measurements.append(Measurement(f"{name}: error of the {part}", error))
            if not error <= TOLERANCE[str(dtype)]:
                problems.append(f"{name}: the {part} differs by {error:.2g}")
    return Found(measurements, {"dtype": str(dtype), "lengths": list(lengths)}, "; ".join(problems))


def _with_gradients(
    attend: "Packed", inputs: "list[torch.Tensor]", dtype: "torch.dtype"
) -> "list[torch.Tensor]":
    """The output for ``inputs`` in ``dtype``, and the gradients of a weighted sum of it."""
    leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
    output = attend(*leaves)
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(output.shape, generator=generator).to(output.device, output.dtype)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), leaves)]


def _reference(lengths: tuple[int, ...], window: int | None) -> "Packed":
    """Attention as its formula, for one sequence at a time."""

    def attend(*packed: "torch.Tensor") -> "torch.Tensor":
        answers = []
        for q, k, v in zip(*(tensor.split(lengths) for tensor in packed), strict=True):
            keys, values = (tensor.repeat_interleave(HEADS // tensor.shape[1], dim=1) for tensor in (k, v))
            positions = torch.arange(len(q), device=q.device)
            distance = positions.unsqueeze(1) - positions
            hidden = (distance < 0) | (distance >= (window or len(q)))
            scores = torch.einsum("qhd,khd->hqk", q, keys) * SIZE**-0.5
            shares = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
            answers.append(torch.einsum("hqk,khd->qhd", shares, values))
        return torch.cat(answers)

    return attend


def _packed(lengths: tuple[int, ...], window: int | None) -> "Packed":
    """The function under test: ours over torch's attention, else flash_attn's or what takes its place."""
    device = devices.torch_device()
    has_own = importlib.util.find_spec("flash_attn") is None and _has_varlen(device)
    if has_own:
        from rlhf_stack.compat import varlen_attention

        positions = torch.cat([torch.arange(length, device=device) for length in lengths]).unsqueeze(0)
        module = torch.nn.Module()
        module.is_causal = True

        def ours(*qkv: "torch.Tensor") -> "torch.Tensor":
            query, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in qkv)
            answer, _ = varlen_attention.forward(
                module, query, key, value, None, sliding_window=window, position_ids=positions
            )
            return answer[0]

        return ours
    from rlhf_stack.compat.flash_attention_2 import flash_attn_varlen_func

    starts = torch.tensor((0, *lengths), device=device).cumsum(0, dtype=torch.int32)
    options: dict[str, Any] = {"causal": True}
    options |= {"window_size": (window - 1, 0)} if window else {}
    longest = max(lengths)
    return lambda q, k, v: flash_attn_varlen_func(q, k, v, starts, starts, longest, longest, **options)


def _has_varlen(device: "torch.device") -> bool:
    """Whether torch has variable-length attention; `NotClimbedError` if it is too old for ours."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ModuleNotFoundError:
        return False
    missing = {"window_size", "enable_gqa"} - set(inspect.signature(varlen_attn).parameters)
    if missing and device.type == "cuda":
        raise NotClimbedError(f"varlen_attn of torch {torch.__version__} has no {', '.join(sorted(missing))}")
    return True
