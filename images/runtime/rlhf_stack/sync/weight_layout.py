"""Where an engine worker's tensors hold the elements of the trainer's parameters.

An engine shards, fuses and pads: its tensors have other names and shapes than the trainer's. The layout is
found by calling the model's own loader, for one parameter at a time, while no operation may write to the
engine's tensors (`load_trace`). No code here depends on an architecture. `find_layout` runs once and needs
memory for one parameter (`load_trace`); a checksum after each sync then only reads the live weights
(`digest.digest_model`).
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from rlhf_stack.lazy import torch
from rlhf_stack.sync import load_trace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Indices = NDArray[np.int64]

MAX_PIECES = 10_000  # of a parameter in a tensor; a layout of more is irregular
LOADER_ERRORS = (AssertionError, NotImplementedError, RuntimeError, ValueError)  # of a layout that it refuses
Shape = tuple[int, ...]


@dataclass(frozen=True)
class View:
    """A strided view of a tensor's storage: ``offset``, ``sizes`` and ``strides`` in elements."""

    offset: int
    sizes: Shape
    strides: Shape

    @staticmethod
    def of(tensor: "torch.Tensor") -> "View":
        """Return the view that ``tensor`` is."""
        return View(tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))

    def select(self, tensor: "torch.Tensor", offset: int = 0) -> "torch.Tensor":
        """Return the elements of the storage of ``tensor``, from its element ``offset`` on."""
        return tensor.as_strided(self.sizes, self.strides, self.offset + offset)

    @property
    def count(self) -> int:
        """The number of elements."""
        return prod(self.sizes)

    def mark(self, covered: "torch.Tensor", value: bool = True) -> None:
        """Set the elements of the flat ``covered`` to ``value``."""
        self.simplified().select(covered).fill_(value)

    def simplified(self) -> "View":
        """Return a view of the same elements, each once, in order of their addresses, with few sides."""
        sides = sorted(
            side for side in zip(self.strides, self.sizes, strict=True) if side[0] and side[1] != 1
        )
        merged: list[tuple[int, int]] = []
        for stride, size in sides:
            if merged and stride == merged[-1][0] * merged[-1][1]:
                merged[-1] = merged[-1][0], merged[-1][1] * size
            else:
                merged.append((stride, size))
        merged.reverse()
        return View(self.offset, tuple(size for _, size in merged), tuple(stride for stride, _ in merged))

    def shifted(self, elements: int) -> "View":
        """Return the same view, so many ``elements`` later."""
        return View(self.offset + elements, self.sizes, self.strides)

    def within(self, begin: int, end: int) -> Iterator["View"]:
        """Yield views of its elements from ``begin`` to ``end``; this view is `simplified`."""
        sides = tuple(zip(self.sizes, self.strides, strict=True))
        last = self.offset + sum((size - 1) * stride for size, stride in sides)
        if last < begin or end <= self.offset:
            return
        if begin <= self.offset and last < end:
            yield self
            return
        (size, stride), half = sides[0], self.sizes[0] // 2
        for first, count in ((0, half), (half, size - half)):
            part = View(self.offset + first * stride, (count, *self.sizes[1:]), self.strides)
            yield from part.simplified().within(begin, end)

    def bounds(self, shape: Shape) -> list[list[int]] | None:
        """Return [start, stop] for each dimension of a contiguous tensor of ``shape``, None if not a box."""
        sides = {stride: size for size, stride in zip(self.sizes, self.strides, strict=True) if size > 1}
        rest, stride, found = self.offset, 1, []
        for size in reversed(shape):
            start = rest % size
            length = sides.pop(stride, 1) if size > 1 else 1
            if start + length > size:
                return None
            found.append([start, start + length])
            rest, stride = rest // size, stride * size
        return None if sides else found[::-1]


@dataclass(frozen=True)
class Location:
    """The ``elements`` of an engine ``tensor`` that hold a ``region`` of parameter ``name`` of ``shape``.

    Both views have the same sizes. ``region`` is of the contiguous parameter.
    """

    name: str
    shape: Shape
    region: View
    tensor: str
    elements: View


Layout = tuple[Location, ...]
Piece = tuple[View, View]  # of a parameter, and of the engine's tensor that holds it; of the same sizes


def find_layout(model: Any, parameters: Sequence[tuple[str, Shape]]) -> Layout:
    """Return where the engine ``model`` holds each element of ``parameters`` (name, shape).

    ``model.load_weights`` must accept (name, tensor) pairs, as every vLLM model does. Engine elements that
    the loader fills with zeros (vocabulary padding), does not change or computes belong to no parameter. The
    live weights are never written. NotImplementedError for a layout without any regularity.
    """
    tensors = engine_tensors(model)
    live = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())]
    locations: list[Location] = []
    for name, shape in parameters:
        try:
            for tensor, region, elements in _found(model, tensors, name, shape):
                locations.append(Location(name, shape, region, tensor, elements))
        finally:
            for tensor, data in live:
                tensor.data = data  # of a loader that replaces tensors instead of writing them
    return tuple(locations)


def other_dtypes(model: Any, content: Sequence[Sequence[Any]], dtype: Any) -> dict[str, str]:
    """Return the dtypes of the trainer's parameters that ``model`` holds in another one than its ``dtype``.

    ``content`` are the fields of each `ParameterSpec`. It ends at the first parameter that is not held so: a
    model that is trained in another dtype has no other ones.
    """
    usual = str(dtype).removeprefix("torch.")
    found: dict[str, str] = {}
    for name, sent, shape, *_ in content:
        if sent == usual:
            continue
        try:
            layout = find_layout(model, [(name, tuple(shape))])
        except LOADER_ERRORS:
            break
        tensors = engine_tensors(model)
        if any(str(tensors[each.tensor].dtype) != f"torch.{sent}" for each in layout):
            break
        found[name] = sent
    return found


def comparable_layout(
    model: Any, parameters: Sequence[tuple[str, Shape]], rearranged: Collection[str]
) -> tuple[Layout, dict[str, set[str]]]:
    """Return `find_layout` without parameters that are in ``rearranged`` tensors.

    The loader knows the layout that such a tensor had before, or refuses to write to it. The names of these
    parameters are returned with those of their tensors, which are unknown (none) after a refusal.
    """
    locations: list[Location] = []
    left_out: dict[str, set[str]] = {}
    for name, shape in parameters:
        try:
            found = find_layout(model, [(name, shape)])
        except LOADER_ERRORS:
            if not rearranged:
                raise
            left_out[name] = set()
            continue
        tensors = {location.tensor for location in found}
        if tensors.isdisjoint(rearranged):
            locations += found
        else:
            left_out[name] = tensors
    return tuple(locations), left_out


def engine_tensors(model: Any) -> dict[str, "torch.Tensor"]:
    """Return the parameters and buffers of the engine's ``model`` that have elements, by name."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in named if tensor.numel()}


def _found(
    model: Any, tensors: dict[str, "torch.Tensor"], name: str, shape: Shape
) -> Iterator[tuple[str, View, View]]:
    """Yield the engine tensors that hold parameter ``name``, with the views of parameter and tensor."""
    owners = {load_trace.storage_of(tensor): owner for owner, tensor in reversed(tensors.items())}
    copies = load_trace.copies(model, list(tensors.values()), name, shape)
    if copies is not None:
        for target, source in copies:
            yield owners[load_trace.storage_of(target)], View.of(source), View.of(target)
        return
    for storage, pairs in load_trace.numbers(model, list(tensors.values()), name, shape):
        for region, elements in strided_pieces(pairs, name):
            yield owners[storage], region, elements


def strided_pieces(chunks: "Iterable[tuple[Indices, Indices]]", name: str) -> list[Piece]:
    """Split pairs of flat indices, which come in ``chunks``, into strided views of both, in their order.

    Each is as large as its first row and step allow. ``name`` is for the NotImplementedError, raised for more
    than `MAX_PIECES`.
    """
    import numpy as np

    pieces: list[Piece] = []
    rest = np.empty((2, 0), dtype=np.int64)
    for chunk in chunks:
        rest = _split(np.concatenate([rest, np.stack(chunk)], axis=1), pieces, name)
    while rest.shape[1]:  # what ends with a chunk could have continued in the next one
        rest = _split(rest, pieces, name, is_last=True)
    while len(pieces) > 1 and (joined := _joined(pieces[-2], pieces[-1], stacks=True)):
        pieces[-2:] = [joined]
    return pieces


def _split(pairs: "Indices", pieces: list[Piece], name: str, is_last: bool = False) -> "Indices":
    """Add pieces of ``pairs`` (2 x n), to which others follow unless ``is_last``; return what is left."""
    first = _continued(pieces, pairs)
    pairs = pairs[:, first:]
    begin = 0
    while begin < pairs.shape[1]:
        count, sides = _leading_grid(pairs[:, begin:])
        if begin and begin + count == pairs.shape[1] and not is_last:
            break
        sizes = tuple(size for size, _ in reversed(sides))
        region, elements = (
            View(int(pairs[side, begin]), sizes, tuple(int(step[side]) for _, step in reversed(sides)))
            for side in (0, 1)
        )
        _add(pieces, (region, elements))
        if len(pieces) > MAX_PIECES:
            raise NotImplementedError(
                f"the loader of the engine places the elements of {name} without regularity"
            )
        begin += count
    return pairs[:, begin:]


def _continued(pieces: list[Piece], pairs: "Indices") -> int:
    """Let the last of ``pieces`` continue in ``pairs`` by whole rows; return of how many pairs they are."""
    import numpy as np

    if not pieces or not pieces[-1][0].sizes:
        return 0
    sizes = pieces[-1][0].sizes
    row = prod(sizes[1:])
    rows = pairs.shape[1] // row
    follows = np.ones(rows, dtype=bool)
    for view, indices in zip(pieces[-1], pairs[:, : rows * row].reshape(2, rows, row), strict=True):
        inner = np.zeros(1, dtype=np.int64)
        for size, stride in zip(sizes[1:], view.strides[1:], strict=True) if rows else ():
            inner = (inner[:, None] + np.arange(size) * stride).reshape(-1)
        starts = view.offset + (sizes[0] + np.arange(rows)) * view.strides[0]
        follows &= (indices == starts[:, None] + inner).all(axis=1) if rows else True
    count = rows if follows.all() else int(np.argmin(follows))
    region, elements = (
        View(view.offset, (sizes[0] + count, *sizes[1:]), view.strides) for view in pieces[-1]
    )
    pieces[-1] = region, elements
    return count * row


def _add(pieces: list[Piece], new: Piece) -> None:
    """Add a piece that follows ``pieces``; what it completes is joined, as a row with the rows before it."""
    while pieces:
        if joined := _joined(pieces[-1], new):
            pieces[-1] = joined
            return
        if len(pieces) == 1 or not (joined := _joined(pieces[-2], pieces[-1], stacks=True)):
            break
        pieces[-2:] = [joined]
    pieces.append(new)


def _joined(first: Piece, second: Piece, stacks: bool = False) -> Piece | None:
    """Return one piece with the pairs of both, in order; None if there is none.

    Either has one row, or several, of the same kind. If ``stacks``, both may be rows of a new kind.
    """
    (one, _), (other, _) = first, second
    dimensions, others = len(one.sizes), len(other.sizes)
    steps = tuple(after.offset - before.offset for before, after in zip(first, second, strict=True))
    if min(steps) < 0:
        return None
    if dimensions >= others and dimensions and _are_rows(first, second, dimensions - others):
        number = one.sizes[0] + (other.sizes[0] if dimensions == others else 1)
        if steps == tuple(one.sizes[0] * view.strides[0] for view in first):
            return _with_rows(first, (number, *one.sizes[1:]), [view.strides for view in first])
    is_row = others == dimensions + 1 and _are_rows(second, first, 1)
    if is_row and steps == tuple(view.strides[0] for view in second):
        return _with_rows(first, (other.sizes[0] + 1, *one.sizes), [view.strides for view in second])
    if stacks and one.sizes == other.sizes and _are_rows(first, second, 0):
        strides = [(step, *view.strides) for step, view in zip(steps, first, strict=True)]
        return _with_rows(first, (2, *one.sizes), strides)
    return None


def _are_rows(whole: Piece, part: Piece, outer: int) -> bool:
    """Report whether ``part`` has the rows of ``whole``, which has ``outer`` dimensions more: 0 or 1."""
    if outer > 1 or whole[0].sizes[1:] != part[0].sizes[1 - outer :]:
        return False
    return all(one.strides[outer:] == other.strides for one, other in zip(whole, part, strict=True))


def _with_rows(first: Piece, sizes: Shape, strides: Sequence[Shape]) -> Piece:
    region, elements = (View(view.offset, sizes, each) for view, each in zip(first, strides, strict=True))
    return region, elements


def _leading_grid(starts: "Indices") -> "tuple[int, list[tuple[int, Indices]]]":
    """Return how many of the leading pairs ``starts`` (2 x n) form a grid; its sides, from the innermost.

    A side is its size and the step between its elements in both indices.
    """
    import numpy as np

    if starts.shape[1] == 1 or (starts[:, 1] < starts[:, 0]).any():
        return 1, []
    steps = np.diff(starts)
    step = steps[:, :1]
    other = np.flatnonzero((steps != step).any(axis=0))
    length = int(other[0]) + 1 if len(other) else starts.shape[1]
    rows = starts[:, : starts.shape[1] // length * length].reshape(2, -1, length)
    irregular = np.flatnonzero((np.diff(rows) != step[:, :, None]).any(axis=(0, 2)))
    count, outer = _leading_grid(rows[:, : int(irregular[0]) if len(irregular) else None, 0])
    return count * length, [(length, step[:, 0]), *outer]
