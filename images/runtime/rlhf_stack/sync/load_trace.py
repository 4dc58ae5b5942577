"""Traces of a loader: which elements it would copy to which engine tensors, without a write to any of them.

Every operation that would write to an engine tensor is intercepted. A loader that only slices and copies is
traced by its views. For one that rearranges or computes, every element of the parameter gets a number, and
the numbers' digits are loaded, one digit per pass, into substitutes of the tensors that it writes. Whole
tensors are only the parameter, the substitutes, and the digits of the elements that are written, as bytes.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

from rlhf_stack.lazy import torch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Copies = list[tuple[torch.Tensor, torch.Tensor]]
    Pairs = tuple[NDArray[np.int64], NDArray[np.int64]]

BASE, BASE_FP8 = 255, 8  # of digits, which are exact in 16 bits, and in 8 bits
PACKED = {BASE: 1, BASE_FP8: 2}  # digits in a byte
UNKNOWN = 255  # such a byte
CHUNK = 1 << 16  # elements that are computed at a time


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
) -> Iterator[tuple[int, Iterator["Pairs"]]]:
    """Yield, for each storage that ``model`` writes when it loads parameter ``name``, what it would hold.

    That is the storage's address, and in chunks the parameter's flat index at each position of the storage,
    and these positions, which ascend.
    """
    base = BASE_FP8 if any(tensor.dtype.itemsize == 1 for tensor in tensors) else BASE
    like, digits = _typical(tensors), _digits_of(prod(shape), base)
    engine = {storage_of(tensor): tensor for tensor in tensors}
    traced: dict[int, _Traced] = {}
    for digit in range(digits):
        substitutes: dict[int, torch.Tensor] = {}

        def substitute(view: Any, pool: dict[int, Any] = substitutes) -> Any:
            if not isinstance(view, torch.Tensor) or storage_of(view) not in engine:
                return view
            if storage_of(view) not in pool:
                known = traced.get(storage_of(view))
                pool[storage_of(view)] = _unwritten(view, known.span if known else None)
            return pool[storage_of(view)].as_strided(view.shape, view.stride(), view.storage_offset())

        def intercept(function: Any, args: Any, kwargs: Any, replace: Any = substitute) -> Any:
            from torch.utils._pytree import tree_map

            if any(storage_of(each) in engine for each in written(function, args, kwargs)):
                args, kwargs = tree_map(replace, (args, kwargs))
            return function(*args, **kwargs)

        _load(model, name, _digits(shape, base, digit, like), intercept)
        for storage in list(substitutes):
            content = substitutes.pop(storage)
            if digit == 0:
                traced[storage] = _Traced(content, base)
            if storage in traced:
                traced[storage].add(content)
            del content
    for storage, trace in traced.items():
        if trace.count == digits:
            yield storage, trace.pairs(prod(shape))


class _Traced:
    """The digits of the numbers at the positions of a storage that a loader writes.

    ``span`` begins and ends with the first and the last of these, according to the first ``content``.
    """

    def __init__(self, content: "torch.Tensor", base: int) -> None:
        known = [begin + int(at) for begin, read in _chunks(content) for at in _ends(_are_digits(read, base))]
        self.span = slice(min(known, default=0), max(known, default=-1) + 1)
        self.count = 0  # of digits
        self._bytes: list[torch.Tensor] = []
        self._base = base

    def add(self, content: "torch.Tensor") -> None:
        """Add the next digit of each number, as the storage's ``content`` has it."""
        written = content[self.span]
        place = self.count % PACKED[self._base]
        self.count += 1
        if place == 0:
            self._bytes.append(torch.zeros(len(written), dtype=torch.uint8))
        for begin, read in _chunks(written):
            packed = self._bytes[-1][begin : begin + CHUNK]
            is_known = _are_digits(read, self._base) & (packed != UNKNOWN)
            packed.copy_(torch.where(is_known, packed + read * self._base**place, UNKNOWN))

    def pairs(self, count: int) -> "Iterator[Pairs]":
        """Yield flat indices of the parameter, of ``count`` elements, and the positions that have them."""
        base = self._base ** PACKED[self._base]
        for begin in range(0, len(self._bytes[0]), CHUNK):
            read = torch.stack([each[begin : begin + CHUNK].to(torch.int64) for each in self._bytes])
            numbers = sum(each * base**number for number, each in enumerate(read))
            is_known = (read != UNKNOWN).all(dim=0) & (numbers > 0) & (numbers <= count)
            at = torch.nonzero(is_known).reshape(-1)
            yield (numbers[at] - 1).numpy(), (at + (self.span.start + begin)).numpy()


def _digits_of(number: int, base: int) -> int:
    """Return how many digits the numbers up to ``number`` have."""
    return 1 + _digits_of(number // base, base) if number else 0


def _chunks(content: "torch.Tensor") -> Iterator[tuple[int, "torch.Tensor"]]:
    """Yield the elements of flat ``content``, as numbers on the host, and the position of the first."""
    for begin in range(0, len(content), CHUNK):
        yield begin, content[begin : begin + CHUNK].to("cpu", torch.float32)


def _are_digits(read: "torch.Tensor", base: int) -> "torch.Tensor":
    return (read >= 0) & (read < base) & (read == read.round())


def _ends(marked: "torch.Tensor") -> "torch.Tensor":
    """Return the first and the last position that is marked, none if none is."""
    return torch.nonzero(marked).reshape(-1)[[0, -1]] if marked.any() else torch.empty(0)


def _unwritten(view: "torch.Tensor", span: slice | None) -> "torch.Tensor":
    """Return flat memory like the storage of ``view``, with what is no digit in ``span``, or everywhere.

    All of its bits are set: it is NaN, -1, or the largest number.
    """
    size = view.element_size()
    count = view.untyped_storage().nbytes() // size
    memory = torch.empty(count * size, dtype=torch.uint8, device=view.device)
    first, last = (span.start, span.stop) if span else (0, count)
    memory[first * size : last * size].fill_(255)
    return memory.view(view.dtype)


def _digits(shape: tuple[int, ...], base: int, digit: int, like: "torch.Tensor") -> "torch.Tensor":
    """Return a digit of each element's number; numbers begin at 1, as 0 is padding."""
    digits = torch.empty(prod(shape), dtype=like.dtype, device=like.device)
    for begin in range(0, len(digits), CHUNK):
        part = digits[begin : begin + CHUNK]
        counted = torch.arange(begin + 1, begin + len(part) + 1, dtype=torch.int64, device=like.device)
        part.copy_((counted // base**digit) % base)
    return digits.reshape(shape)


def _load(model: Any, name: str, value: "torch.Tensor", intercept: Any) -> None:
    """Load one parameter with ``intercept`` in place of each operation of torch, see `intercepted`."""
    with torch.no_grad(), intercepted(intercept):
        model.load_weights(weights=[(name, value)])


def intercepted(intercept: Any) -> Any:
    """Return a context in which ``intercept(function, args, kwargs)`` replaces each operation of torch."""
    return _interception()(intercept)


@cache
def _interception() -> Any:
    """Return the class of `intercepted`, only one: tensors in a class of each call would be freed late."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Intercepted(TorchDispatchMode):  # type: ignore[misc]
        def __init__(self, intercept: Any) -> None:
            super().__init__()
            self._intercept = intercept

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return self._intercept(function, args, kwargs or {})

    return Intercepted


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
