"""Where an engine worker's tensors hold the elements of the trainer's parameters.

An engine shards, fuses and pads: its tensors have other names and shapes than the trainer's. The layout is
found by calling the model's own loader: every element of every parameter gets a number, the numbers' base-256
digits (0..255 is exact in bfloat16, float16 and float32) are loaded as if they were weights, one digit per
pass, and read back from the engine's tensors. No code here depends on an architecture.

`find_layout` runs once. It needs 8 bytes for each element that the worker holds, and a copy of the live
weights; a checksum after each sync then only reads the live weights (`digest.digest_model`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    Indices = NDArray[np.int64]

DIGIT_BITS = 8
BASE = 1 << DIGIT_BITS
Shape = tuple[int, ...]
StridedView = tuple[int, Shape, Shape]  # offset, sizes and strides, in elements


@dataclass(frozen=True)
class Region:
    """Elements of one parameter of ``shape``, in ascending order of their flat index.

    ``bounds`` are (start, stop) for each dimension if the elements fill a hyperrectangle; otherwise it is
    None, and ``runs`` are (start, stop) of flat indices.
    """

    shape: Shape
    bounds: tuple[tuple[int, int], ...] | None
    runs: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def from_flat(shape: Shape, flat: "Indices") -> "Region":
        """Return the region of the ascending, distinct flat indices ``flat`` (at least one) in ``shape``."""
        import numpy as np

        if not shape:
            return Region(shape, ())
        corners = np.stack(np.unravel_index(flat, shape))
        low, high = corners.min(axis=1), corners.max(axis=1) + 1
        if prod(int(side) for side in high - low) == len(flat):
            return Region(shape, tuple((int(a), int(b)) for a, b in zip(low, high, strict=True)))
        breaks = np.flatnonzero(np.diff(flat) != 1)
        starts = flat[np.concatenate(([0], breaks + 1))]
        stops = flat[np.concatenate((breaks, [len(flat) - 1]))] + 1
        return Region(shape, None, tuple((int(a), int(b)) for a, b in zip(starts, stops, strict=True)))

    def select(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """Return the region's elements of ``tensor`` (of this shape), flat, in ascending order."""
        import torch

        if self.bounds is not None:
            return tensor[tuple(slice(a, b) for a, b in self.bounds)].reshape(-1)
        flat = tensor.reshape(-1)
        return torch.cat([flat[a:b] for a, b in self.runs])

    def mark(self, covered: "NDArray[np.bool_]") -> None:
        """Set the region's elements of ``covered`` (of this shape) to True."""
        if self.bounds is not None:
            covered[tuple(slice(a, b) for a, b in self.bounds)] = True
        else:
            flat = covered.reshape(-1)
            for start, stop in self.runs:
                flat[start:stop] = True


@dataclass(frozen=True)
class Location:
    """The elements of an engine ``tensor`` that hold a region of parameter ``name``.

    ``positions`` are a strided view of the flat engine tensor if its elements are regular, otherwise the flat
    position of each element, in the region's order.
    """

    name: str
    region: Region
    tensor: str
    positions: "StridedView | torch.Tensor"

    def read(self, flat: "torch.Tensor") -> "torch.Tensor":
        """Return the elements, flat and in the region's order, from the ``flat`` engine tensor."""
        if isinstance(self.positions, tuple):
            offset, sizes, strides = self.positions
            return flat.as_strided(sizes, strides, flat.storage_offset() + offset).reshape(-1)
        return flat[self.positions.to(flat.device)]


Layout = tuple[Location, ...]


def find_layout(model: Any, parameters: Sequence[tuple[str, Shape]]) -> Layout:
    """Return where the engine ``model`` holds each element of ``parameters`` (name, shape).

    ``model.load_weights`` must accept (name, tensor) pairs, as every vLLM model does. Engine elements that
    the loader fills with zeros (vocabulary padding), does not change or computes belong to no parameter. The
    live weights are restored bit for bit at the same addresses, also if the loader raises.
    """
    import torch

    tensors = engine_tensors(model)
    first = _first_numbers(parameters)
    last = first[-1] - 1
    passes = -(-last.bit_length() // DIGIT_BITS)
    saved = [(tensor, tensor.data, tensor.detach().clone()) for _, tensor in tensors]
    numbers = {name: torch.zeros(tensor.numel(), dtype=torch.int64) for name, tensor in tensors}
    unknown = {name: torch.zeros(tensor.numel(), dtype=torch.bool) for name, tensor in tensors}
    try:
        for digit in range(passes):
            for _, tensor in tensors:
                tensor.data.fill_(float("nan"))
            model.load_weights(weights=list(_digit_tensors(parameters, first, digit, tensors[0][1])))
            for name, tensor in tensors:
                values = tensor.detach().reshape(-1).to("cpu", torch.float32)
                unknown[name] |= ~((values >= 0) & (values < BASE) & (values == values.round()))
                numbers[name] += torch.nan_to_num(values).to(torch.int64).clamp(0, BASE - 1) * BASE**digit
    finally:
        for tensor, data, content in saved:
            tensor.data = data
            tensor.data.copy_(content)
    locations: list[Location] = []
    for name, _ in tensors:
        numbers[name][unknown[name]] = 0
        locations += _locations(name, numbers[name].numpy(), parameters, first)
    return tuple(locations)


def engine_tensors(model: Any) -> list[tuple[str, "torch.Tensor"]]:
    """Return the floating-point parameters of the engine's ``model``, by name."""
    return [(name, tensor) for name, tensor in model.named_parameters() if tensor.is_floating_point()]


def _first_numbers(parameters: Sequence[tuple[str, Shape]]) -> list[int]:
    """Return the number of each parameter's first element, then the first unused number; 0 means padding."""
    first = [1]
    for _, shape in parameters:
        first.append(first[-1] + prod(shape))
    return first


def _digit_tensors(
    parameters: Sequence[tuple[str, Shape]], first: Sequence[int], digit: int, like: "torch.Tensor"
) -> Iterator[tuple[str, "torch.Tensor"]]:
    import torch

    for (name, shape), start in zip(parameters, first, strict=False):
        values = torch.arange(start, start + prod(shape), dtype=torch.int64, device=like.device)
        yield name, ((values // BASE**digit) % BASE).to(like.dtype).reshape(shape)


def _locations(
    tensor: str, numbers: "Indices", parameters: Sequence[tuple[str, Shape]], first: Sequence[int]
) -> Iterator[Location]:
    """Yield the locations in an engine ``tensor`` whose elements have ``numbers`` (0: no parameter's)."""
    import numpy as np

    positions = np.flatnonzero((numbers > 0) & (numbers < first[-1]))
    positions = positions[np.argsort(numbers[positions], kind="stable")]
    ordered = numbers[positions]
    for copy_positions, copy_numbers in _copies(positions, ordered):
        edges = np.searchsorted(copy_numbers, first)
        for index, (name, shape) in enumerate(parameters):
            low, high = edges[index], edges[index + 1]
            if low == high:
                continue
            region = Region.from_flat(shape, copy_numbers[low:high] - first[index])
            yield _location(name, region, tensor, copy_positions[low:high])


def _copies(positions: "Indices", ordered: "Indices") -> Iterator[tuple["Indices", "Indices"]]:
    """Split the elements of a tensor that holds some repeatedly into parts without repetitions."""
    import numpy as np

    while len(ordered):
        is_first = np.concatenate(([True], np.diff(ordered) != 0))
        yield positions[is_first], ordered[is_first]
        positions, ordered = positions[~is_first], ordered[~is_first]


def _location(name: str, region: Region, tensor: str, positions: "Indices") -> Location:
    """Return the location of ``region`` at flat ``positions``, as a strided view if they are regular."""
    import numpy as np
    import torch

    if region.bounds is not None:
        sizes = tuple(b - a for a, b in region.bounds)
        grid = positions.reshape(sizes)
        origin = int(grid.reshape(-1)[0])
        strides = tuple(
            int(grid.take(1, axis=axis).reshape(-1)[0]) - origin if size > 1 else 1
            for axis, size in enumerate(sizes)
        )
        expected = np.full(sizes, origin, dtype=np.int64)
        for axis, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
            line = np.arange(size, dtype=np.int64) * stride
            expected += line.reshape([-1 if other == axis else 1 for other in range(len(sizes))])
        if all(stride >= 0 for stride in strides) and np.array_equal(expected, grid):
            return Location(name, region, tensor, (origin, sizes, strides))
    return Location(name, region, tensor, torch.from_numpy(positions.copy()))
