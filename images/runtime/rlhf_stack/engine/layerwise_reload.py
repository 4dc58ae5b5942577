"""A layer-wise reload of vLLM 0.29 that keeps weights which are not sent, and collects one worker's shard.

vLLM collects what arrives of a layer until it is complete, and then loads it into new memory. Upstream
collects whole parameters, also those of experts of other workers, and the new memory of what does not arrive
is copied, uninitialized, over the weights of the engine.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import layerwise, meta, utils

from rlhf_stack.lazy import torch
from rlhf_stack.sync import SyncError
from rlhf_stack.sync.load_trace import intercepted, written
from rlhf_stack.sync.weight_layout import View

WRAPPER = "online_process_loader"  # vLLM's own name of the loader that collects


@dataclass
class Elements:
    """What a loader copies into a parameter: views of it, and the elements, which take the place of a weight.

    ``arguments``, ``args`` and ``kwargs`` are those of `inspect.BoundArguments`, with which vLLM collects.
    """

    copies: "list[tuple[View, torch.Tensor]]"
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments of the loader."""
        return self.arguments["param"], self

    @property
    def kwargs(self) -> dict[str, Any]:
        """No further ones."""
        return {}

    def load(self, parameter: "torch.Tensor") -> None:
        """Copy the elements into ``parameter``."""
        for view, elements in self.copies:
            view.select(parameter.data).copy_(elements)


class LayerwiseReload:
    """One reload of ``model``; vLLM may have changed the layout of ``rearranged`` tensors after loading."""

    def __init__(self, model: Any, rearranged: Collection[str]) -> None:
        self._model, self._rearranged = model, rearranged
        self._collected: dict[int, int] = {}  # entries of a layer that refer to no memory of a bucket
        self._loaded: set[str] = set()  # as the model reports it
        layerwise.initialize_layerwise_reload(model)
        self._layers = [
            (prefix, layer, layerwise.get_layerwise_info(layer)) for prefix, layer in model.named_modules()
        ]
        self._targets = {
            tensor.untyped_storage()._cdata: (f"{prefix}.{name}".removeprefix("."), tensor, info)
            for prefix, layer, info in self._layers
            for name, tensor in utils.get_layer_tensors(layer).items()
            if tensor.is_meta
        }

    def load(self, weights: "Sequence[tuple[str, torch.Tensor]]") -> None:
        """Load ``weights``; of a layer that is not complete the elements of this worker's shard are kept."""
        with _outside_of_loaders(self._collect_write):
            self._loaded.update(self._model.load_weights(weights) or ())
        for index, (_, layer, info) in enumerate(self._layers):
            is_whole = info.can_load() and 0 < info.load_numel_total <= info.load_numel
            if is_whole and not is_deferred_attention_layer(layer):  # vLLM looks after calls of loaders alone
                layerwise._layerwise_process(layer, info)
            entries = info.loaded_weights
            for number in range(self._collected.get(index, 0), len(entries)):
                name, arguments = entries[number]
                if not isinstance(arguments, Elements):
                    entries[number] = name, shard_of(arguments)
            self._collected[index] = len(entries)

    def finish(self, model_config: Any) -> set[str]:
        """Load the layers that are not complete; return the names of the tensors that were written.

        What did not arrive of a layer keeps its value. `SyncError` if that is in another layout by now.
        """
        names = {name for name in self._loaded if name.rpartition(".")[2] in meta.SKIP_LOAD_TENSORS}
        names |= {
            f"{prefix}.{name}".removeprefix(".")
            for prefix, layer, info in self._layers
            for name in _written(layer, info)
        }
        for prefix, layer, info in self._layers:
            if info.can_load() and info.load_numel > 0 and not is_deferred_attention_layer(layer):
                self._keep_unsent(prefix, layer, info)
                layerwise._layerwise_process(layer, info)
        layerwise.finalize_layerwise_reload(self._model, model_config)
        return names

    def abort(self, model_config: Any) -> None:
        """End a reload that failed: layers that are not complete keep the weights from before it."""
        for _, _, info in self._layers:
            info.loaded_weights.clear()
            info.load_numel = 0
        layerwise.finalize_layerwise_reload(self._model, model_config)

    def _collect_write(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Collect what a model writes to a parameter itself, without its loader, as gpt-oss does."""
        for tensor in written(function, args, kwargs):
            if not tensor.is_meta or (target := self._targets.get(tensor.untyped_storage()._cdata)) is None:
                continue
            full_name, parameter, info = target
            name = full_name.rpartition(".")[2]
            elements = _elements(function, args)
            if elements is None or not info.can_load():
                raise SyncError(
                    f"weight sync: vLLM's loader of {type(self._model).__name__} writes {full_name} with "
                    f"{function}, without its weight_loader, so that the weight cannot be collected"
                )
            _accept_elements(parameter)
            info.loaded_weights.append((name, Elements([(View.of(tensor), elements)], {"param": parameter})))
            if function is torch.ops.aten.copy_.default:
                info.load_numel += tensor.numel()
        return function(*args, **kwargs)

    def _keep_unsent(self, prefix: str, layer: Any, info: Any) -> None:
        """Give the tensors of ``layer`` memory with the values that they have in the engine."""
        present = {name: each for tensors in info.kernel_tensors for name, each in tensors.items()}
        for name, tensor in utils.get_layer_tensors(layer).items():
            if not tensor.is_meta:
                continue
            old = present.get(name)
            full_name = f"{prefix}.{name}".removeprefix(".")
            is_same = old is not None and (old.shape, old.dtype) == (tensor.shape, tensor.dtype)
            if is_same and full_name not in self._rearranged:
                with info.restore_device:
                    value = meta.materialize_meta_tensor(tensor)
                value.data.copy_(old)
                setattr(layer, name, value)
            elif not _is_sent(name, tensor, info):
                raise SyncError(
                    f"weight sync: {full_name} is not sent, or a part of it, but other weights of its layer "
                    "are, and vLLM has rearranged the layer after loading, so that its value cannot be kept: "
                    "train all weights of the layer or none"
                )


@contextmanager
def _outside_of_loaders(intercept: Callable[..., Any]) -> Iterator[None]:
    """Intercept operations, except in the loaders that vLLM has wrapped and in what follows a whole layer."""
    mode = intercepted(intercept)

    def without(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            mode.__exit__(None, None, None)
            try:
                return function(*arguments)
            finally:
                mode.__enter__()

        return call

    functions = layerwise.get_numel_loaded, layerwise._layerwise_process
    layerwise.get_numel_loaded, layerwise._layerwise_process = map(without, functions)
    try:
        with mode:
            yield
    finally:
        layerwise.get_numel_loaded, layerwise._layerwise_process = functions


def shard_of(arguments: Any) -> Any:
    """Return what takes the place of a loader's ``arguments``: the `Elements` that it copies.

    Of a loader that computes, the arguments with copies of their tensors.
    """
    from torch.utils._pytree import tree_map

    parameter = arguments.arguments.get("param")

    def copied(value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) and value is not parameter else value

    copies = None if parameter is None or not parameter.is_meta else _copies(parameter, arguments)
    if copies is not None:
        _accept_elements(parameter)
        return Elements(copies)
    arguments.arguments.update(tree_map(copied, dict(arguments.arguments)))
    return arguments


def _copies(parameter: Any, arguments: Any) -> "list[tuple[View, torch.Tensor]] | None":
    """Return copies of what the loader copies into ``parameter``; None if it writes it in another way."""
    copies: list[tuple[View, torch.Tensor]] = []
    storage = parameter.untyped_storage()._cdata
    is_followed = True

    def intercept(function: Any, args: Any, kwargs: Any) -> Any:
        nonlocal is_followed
        if any(each.untyped_storage()._cdata == storage for each in written(function, args, kwargs)):
            elements = _elements(function, args)
            if elements is None:
                is_followed = False
            elif args[0].numel():
                copies.append((View.of(args[0]), elements))
        return function(*args, **kwargs)

    loader = layerwise._get_original_loader(parameter)
    with torch.no_grad(), intercepted(intercept):
        loader(*arguments.args, **arguments.kwargs)
    return copies if is_followed and parameter.untyped_storage()._cdata == storage else None


def _elements(function: Any, args: Any) -> "torch.Tensor | None":
    """Return what an operation writes to its first argument; None if it is neither a copy nor a fill."""
    aten = torch.ops.aten
    if function is aten.copy_.default and not args[1].is_meta:
        return args[1].clone(memory_format=torch.contiguous_format)
    if function in (aten.fill_.Scalar, aten.zero_.default):  # padding
        return torch.full((), 0 if function is aten.zero_.default else args[1])
    return None


def _accept_elements(parameter: Any) -> None:
    """Let the loader of ``parameter``, which vLLM calls when the layer is complete, accept `Elements`."""
    wrapper = layerwise._get_weight_loader(parameter)
    while wrapper.__wrapped__.__name__ == WRAPPER:
        wrapper = wrapper.__wrapped__
    original = wrapper.__wrapped__
    if hasattr(original, "accepts_elements"):
        return

    @wraps(original)
    def load(parameter: Any, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], Elements):
            return args[0].load(parameter)
        return original(parameter, *args, **kwargs)

    load.accepts_elements = True  # type: ignore[attr-defined]
    wrapper.__wrapped__ = load


def _written(layer: Any, info: Any) -> Iterator[str]:
    """Yield the names of the tensors of ``layer`` that were written, at least in part."""
    if not info.can_load():  # the layer was complete
        yield from (name for name in utils.get_layer_tensors(layer) if name not in meta.SKIP_LOAD_TENSORS)
        return
    for name, entry in info.loaded_weights:
        if not isinstance(entry, Elements) or entry.copies:
            yield name


def _is_sent(name: str, tensor: Any, info: Any) -> bool:
    """Report whether each index of the first dimension of ``tensor`` was written, such as each expert.

    Other dimensions may be padded.
    """
    entries = [entry for other, entry in info.loaded_weights if other == name]
    if not all(isinstance(entry, Elements) for entry in entries):
        return True  # what is written is unknown
    is_written = torch.zeros(tensor.shape[:1] or 1, dtype=torch.bool)
    step = tensor.stride(0) if tensor.ndim else 1
    for view, _ in (copy for entry in entries for copy in entry.copies):
        last = view.offset + sum(
            (size - 1) * each for size, each in zip(view.sizes, view.strides, strict=True)
        )
        is_written[view.offset // step : last // step + 1] = True
    return bool(is_written.all())
