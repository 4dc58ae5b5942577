"""Traces of a loader: which elements it would copy to which engine tensors, without a write to any of them.

Every operation that would write to an engine tensor is intercepted. A loader that only slices and copies is
traced by its views. For one that rearranges or computes, every element of the parameter gets a number, and
the numbers' digits are loaded, one digit per pass, into substitutes of the tensors that it writes.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from rlhf_stack.lazy import torch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Copies = list[tuple[torch.Tensor, torch.Tensor]]
    Numbered = tuple[int, NDArray[np.int64], NDArray[np.int64]]

DIGIT_BITS, DIGIT_BITS_FP8 = 8, 3  # integers of so many bits are exact in 16 bits, and in 8 bits


def storage_of(tensor: "torch.Tensor") -> int:
    """Return the address of a tensor's storage, which all of its views share."""
    return int(tensor.untyped_storage().data_ptr())


def copies(
    model: Any, tensors: Sequence["torch.Tensor"], name: str, shape: tuple[int, ...]
) -> "Copies | None":
    """Return the copies by which ``model`` loads parameter ``name``: engine view, view of the parameter.

    ``tensors`` are the engine's. None if the loader does not only slice and copy.
    """
    like = _typical(tensors)
    source = torch.empty(shape, dtype=like.dtype, device=like.device)
    engine = {storage_of(tensor) for tensor in tensors}
    found: Copies = []
    is_followed = True

    def intercept(function: Any, args: Any, kwargs: Any) -> Any:
        nonlocal is_followed
        used = any(storage_of(each) == storage_of(source) for each in tensors_in((args, kwargs)))
        targets = written(function, args, kwargs)
        if any(storage_of(each) in engine for each in targets):
            if used and function is torch.ops.aten.copy_.default:
                found.append((args[0], args[1].expand_as(args[0])))
            elif used:
                is_followed = False
            return args[0] if function._schema.returns else None
        result = function(*args, **kwargs)
        results = tensors_in(result)
        is_view = results and all(storage_of(each) == storage_of(source) for each in results)
        if used and (targets or not is_view):
            is_followed = False
        return result

    if source.numel():
        _load(model, name, source, intercept)
    return found if is_followed else None


def numbers(
    model: Any, tensors: Sequence["torch.Tensor"], name: str, shape: tuple[int, ...]
) -> Iterator["Numbered"]:
    """Yield, for each storage that ``model`` writes when it loads parameter ``name``, what it would hold.

    That is the storage's address, ascending positions in it, and the parameter's flat index at each of them.
    Needs 8 bytes for each element of these storages.
    """
    bits = DIGIT_BITS_FP8 if any(tensor.dtype.itemsize == 1 for tensor in tensors) else DIGIT_BITS
    base, like = 1 << bits, _typical(tensors)
    engine = {storage_of(tensor): tensor for tensor in tensors}
    values: dict[int, torch.Tensor] = {}  # numbers by storage; -1 is unknown
    for digit in range(-(-prod(shape).bit_length() // bits)):
        substitutes: dict[int, torch.Tensor] = {}

        def substitute(view: Any, pool: dict[int, Any] = substitutes) -> Any:
            if not isinstance(view, torch.Tensor) or storage_of(view) not in engine:
                return view
            if storage_of(view) not in pool:
                pool[storage_of(view)] = _unwritten(view)
            return pool[storage_of(view)].as_strided(view.shape, view.stride(), view.storage_offset())

        def intercept(function: Any, args: Any, kwargs: Any, replace: Any = substitute) -> Any:
            from torch.utils._pytree import tree_map

            if any(storage_of(each) in engine for each in written(function, args, kwargs)):
                args, kwargs = tree_map(replace, (args, kwargs))
            return function(*args, **kwargs)

        _load(model, name, _digits(shape, base, digit, like), intercept)
        for storage, content in substitutes.items():
            read = content.to("cpu", torch.float32)
            is_known = (read >= 0) & (read < base) & (read == read.round())
            known = values.setdefault(storage, torch.zeros(len(read), dtype=torch.int64))
            known[~is_known | (known < 0)] = -1
            known[known >= 0] += read[known >= 0].to(torch.int64) * base**digit
    for storage, known in values.items():
        positions = torch.nonzero((known > 0) & (known <= prod(shape))).reshape(-1)
        yield storage, positions.numpy(), (known[positions] - 1).numpy()


def _unwritten(view: "torch.Tensor") -> "torch.Tensor":
    """Return flat memory like the storage of ``view``, filled with a value that is no digit."""
    count = view.untyped_storage().nbytes() // view.element_size()
    if view.is_floating_point():  # torch 2.3 cannot fill 8-bit numbers
        return torch.full((count,), float("nan"), device=view.device).to(view.dtype)
    return torch.full((count,), torch.iinfo(view.dtype).max, dtype=view.dtype, device=view.device)


def _digits(shape: tuple[int, ...], base: int, digit: int, like: "torch.Tensor") -> "torch.Tensor":
    """Return a digit of each element's number; numbers begin at 1, as 0 is padding."""
    counted = torch.arange(1, prod(shape) + 1, dtype=torch.int64, device=like.device)
    return ((counted // base**digit) % base).to(like.dtype).reshape(shape)


def _load(model: Any, name: str, value: "torch.Tensor", intercept: Any) -> None:
    """Load one parameter with ``intercept`` in place of each operation of torch, see `intercepted`."""
    with torch.no_grad(), intercepted(intercept):
        model.load_weights(weights=[(name, value)])


def intercepted(intercept: Any) -> Any:
    """Return a context in which ``intercept(function, args, kwargs)`` replaces each operation of torch."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Intercepted(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return intercept(function, args, kwargs or {})

    return Intercepted()


def _typical(tensors: Sequence["torch.Tensor"]) -> "torch.Tensor":
    """Return a tensor with the dtype and device of the parameters that a trainer sends."""
    return next((tensor for tensor in tensors if tensor.is_floating_point()), tensors[0])


def written(function: Any, args: Any, kwargs: Any) -> list["torch.Tensor"]:
    """Return the tensors that an operation writes, by its schema."""
    named = zip(function._schema.arguments, args, strict=False)
    values = [value for each, value in named if each.alias_info is not None and each.alias_info.is_write]
    for each in function._schema.arguments:
        if each.alias_info is not None and each.alias_info.is_write and each.name in kwargs:
            values.append(kwargs[each.name])
    return tensors_in(values)


def tensors_in(values: Any) -> list["torch.Tensor"]:
    """Return the tensors in nested tuples, lists and dictionaries: arguments or results of an operation."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, tuple | list):
        return []
    return [tensor for value in values for tensor in tensors_in(value)]
