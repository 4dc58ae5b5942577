"""The layout of a model's checkpoint, which vLLM's loaders know.

transformers 5 renames weights and fuses experts when it loads a model.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

from rlhf_stack.lazy import torch
from rlhf_stack.sync.errors import SyncError

_CACHE = "rlhf_stack_checkpoint_layout"  # an attribute of the model


class Region(NamedTuple):
    """A strided part of a parameter."""

    size: Any
    stride: tuple[int, ...]
    offset: int

    def of(self, weight: "torch.Tensor") -> "torch.Tensor":
        """Return this part of the whole ``weight``, without a copy if that is contiguous."""
        weight = weight.contiguous()
        return weight.as_strided(self.size, self.stride, weight.storage_offset() + self.offset)


Layout = list[tuple[str, str, Region | None]]


def checkpoint_layout(model: Any, shapes: Mapping[str, tuple[Any, Any]]) -> Layout:
    """Return, for each tensor of the checkpoint, its name, the name of its parameter, and its part of that.

    ``shapes`` are the shape and dtype of each parameter of a ``model`` of transformers, which may have PEFT's
    adapters. `SyncError` if a tensor of the checkpoint joins several parameters.
    """
    names = tuple(shapes)
    known: tuple[Any, Layout] | None = getattr(model, _CACHE, None)
    if known is None or known[0] != names:
        known = names, _find_layout(model, shapes)
        setattr(model, _CACHE, known)
    return known[1]


def _find_layout(model: Any, shapes: Mapping[str, tuple[Any, Any]]) -> Layout:
    own: Layout = [(name, name, None) for name in shapes]
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    try:
        from transformers import PreTrainedModel
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before 5.0, whose models are in the layout of their checkpoints
        return own
    if not isinstance(model, PreTrainedModel):
        return own
    empty = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in shapes.items()}
    with _views_alone(), _always_transposed(model):
        written = revert_weight_conversion(model, dict(empty))
    sources = {each.untyped_storage()._cdata: name for name, each in empty.items()}
    layout: Layout = []
    for name, tensor in written.items():
        source = sources.get(tensor.untyped_storage()._cdata)
        if source is None:
            raise SyncError(
                f"weight sync: {name} of the checkpoint of {type(model).__name__} is not a part of one "
                "parameter of transformers' model, so that it cannot be sent to vLLM"
            )
        is_whole = tensor.shape == empty[source].shape and tensor.is_contiguous()
        region = None if is_whole else Region(tensor.shape, tensor.stride(), tensor.storage_offset())
        layout.append((name, source, region))
    return layout


@contextmanager
def _always_transposed(model: Any) -> Iterator[None]:
    """Hide the shapes of parameters: transformers does not transpose what has the shape of its parameter.

    That is for loading, and also leaves out the reversal, but vLLM transposes Qwen3-VL-MoE's experts always.
    """
    model.get_parameter = lambda _: SimpleNamespace(shape=None)
    try:
        yield
    finally:
        del model.get_parameter


def _views_alone() -> Any:
    """Return a context in which a copy of a tensor is the tensor: what is computed are views."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class ViewsAlone(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return args[0] if function is torch.ops.aten.clone.default else function(*args, **(kwargs or {}))

    return ViewsAlone()
