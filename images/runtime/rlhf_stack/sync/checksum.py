"""Which elements of the trainer's parameters an engine worker holds, and a checksum of them.

An engine shards, fuses and pads: its tensors have other names and shapes than the trainer's. Where an element
ends up is found by asking the model's own loader: every element of every parameter gets a number, the
numbers' base-256 digits (0..255 is exact in bfloat16, float16 and float32) are loaded as if they were
weights, one digit a pass, and read back from the engine's tensors. Nothing here knows an architecture.

The layout is found once (`find_layout`: as many bytes as 8 for each element that the worker holds, and the
live weights twice); a checksum after each sync then reads the live weights only (`held_pieces`).
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
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


@dataclass(frozen=True)
class Region:
    """Elements of one parameter, in ascending order of their flat index.

    ``slab`` is (start, stop) for each dimension, if they fill a rectangle; otherwise None, and ``runs`` are
    (start, stop) of flat indices.
    """

    shape: Shape
    slab: tuple[tuple[int, int], ...] | None
    runs: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(shape: Shape, flat: "Indices") -> "Region":
        """The region of the ascending, distinct flat indices ``flat`` (at least one) in ``shape``."""
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
        """The region's elements of ``tensor`` (of this shape), flat, in ascending order."""
        import torch

        if self.slab is not None:
            return tensor[tuple(slice(a, b) for a, b in self.slab)].reshape(-1)
        flat = tensor.reshape(-1)
        return torch.cat([flat[a:b] for a, b in self.runs])

    def mark(self, covered: "NDArray[np.bool_]") -> None:
        """Set the region's elements of ``covered`` (of this shape) to True."""
        if self.slab is not None:
            covered[tuple(slice(a, b) for a, b in self.slab)] = True
        else:
            flat = covered.reshape(-1)
            for start, stop in self.runs:
                flat[start:stop] = True


@dataclass(frozen=True)
class Piece:
    """A region of parameter ``name`` as one engine tensor holds it."""

    name: str
    region: Region
    dtype: str
    sha256: str

    def as_dict(self) -> dict[str, Any]:
        """JSON and msgpack values only."""
        return {
            "name": self.name,
            "shape": list(self.region.shape),
            "slab": None if self.region.slab is None else [list(side) for side in self.region.slab],
            "runs": [list(run) for run in self.region.runs],
            "dtype": self.dtype,
            "sha256": self.sha256,
        }

    @staticmethod
    def from_dict(value: dict[str, Any]) -> "Piece":
        """The inverse of `as_dict`."""
        slab = value["slab"]
        region = Region(
            tuple(value["shape"]),
            None if slab is None else tuple((a, b) for a, b in slab),
            tuple((a, b) for a, b in value["runs"]),
        )
        return Piece(value["name"], region, value["dtype"], value["sha256"])


@dataclass(frozen=True)
class Place:
    """Where an engine tensor keeps a region of parameter ``name``.

    ``where`` is (offset, sizes, strides) into the flat engine tensor if the elements lie regularly, otherwise
    the flat position of each element, in the region's order.
    """

    name: str
    region: Region
    tensor: str
    where: "tuple[int, Shape, Shape] | torch.Tensor"

    def read(self, flat: "torch.Tensor") -> "torch.Tensor":
        """The elements, flat and in the region's order, from the flat engine tensor."""
        if isinstance(self.where, tuple):
            offset, sizes, strides = self.where
            return flat.as_strided(sizes, strides, flat.storage_offset() + offset).reshape(-1)
        return flat[self.where.to(flat.device)]


Layout = tuple[Place, ...]


def digest(elements: "torch.Tensor") -> str:
    """sha256 of the bytes of a flat tensor of any dtype on any device."""
    import torch

    content = elements.detach().contiguous().view(torch.uint8).cpu()
    return hashlib.sha256(memoryview(content.numpy())).hexdigest()


def piece_of(tensor: "torch.Tensor", name: str, region: Region) -> Piece:
    """What a worker that holds ``region`` of the trainer's parameter ``tensor`` has to report."""
    return Piece(name, region, str(tensor.dtype), digest(region.select(tensor.detach())))


def held_pieces(model: Any, layout: Layout) -> Iterator[Piece]:
    """A piece for each place in ``layout``, from the live weights of ``model``."""
    tensors = dict(_tensors(model))
    for place in layout:
        tensor = tensors[place.tensor]
        elements = place.read(tensor.detach().reshape(-1))
        yield Piece(place.name, place.region, str(tensor.dtype), digest(elements))


def uncovered(shape: Shape, regions: Iterable[Region]) -> int:
    """How many elements of a parameter of ``shape`` are in none of ``regions``."""
    import numpy as np

    covered = np.zeros(shape, dtype=bool)
    for region in regions:
        region.mark(covered)
    return int(covered.size - np.count_nonzero(covered))


@dataclass(frozen=True)
class Difference:
    """Where an engine does not hold what the trainer has; ``rank`` is None if no rank holds it."""

    name: str
    engine: int
    rank: int | None
    what: str


def differences(
    name: str, tensor: "torch.Tensor", engines: Sequence[Sequence[Sequence[Piece]]]
) -> list[Difference]:
    """How the trainer's parameter differs from what each rank of each engine reported (its pieces only).

    Every element must be in a piece of some rank of each engine, and every piece must be equal.
    """
    found = []
    own: dict[Region, Piece] = {}
    for engine, ranks in enumerate(engines):
        missing = uncovered(tuple(tensor.shape), [piece.region for pieces in ranks for piece in pieces])
        if missing:
            what = f"{missing} of {tensor.numel()} elements were not found in any rank"
            found.append(Difference(name, engine, None, what))
        for rank, pieces in enumerate(ranks):
            for piece in pieces:
                if piece.region not in own:
                    own[piece.region] = piece_of(tensor, name, piece.region)
                if piece != own[piece.region]:
                    expected = own[piece.region]
                    what = (
                        f"{piece.dtype} {piece.sha256[:12]}, trainer {expected.dtype} {expected.sha256[:12]}"
                    )
                    found.append(Difference(name, engine, rank, what))
    return found


def find_layout(model: Any, parameters: Sequence[tuple[str, Shape]]) -> Layout:
    """Where the engine ``model`` keeps each element of ``parameters`` (name, shape).

    ``model.load_weights`` must take (name, tensor) pairs, as every vLLM model does. What the loader fills
    with zeros (vocabulary padding), leaves alone or computes is no element of a parameter. The live weights
    are the same afterwards, bit for bit and at the same address, also if the loader raises.
    """
    import torch

    tensors = _tensors(model)
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
            model.load_weights(weights=list(_digits(parameters, first, digit, tensors[0][1])))
            for name, tensor in tensors:
                values = tensor.detach().reshape(-1).to("cpu", torch.float32)
                unknown[name] |= ~((values >= 0) & (values < BASE) & (values == values.round()))
                numbers[name] += torch.nan_to_num(values).to(torch.int64).clamp(0, BASE - 1) * BASE**digit
    finally:
        for tensor, data, content in saved:
            tensor.data = data
            tensor.data.copy_(content)
    places: list[Place] = []
    for name, _ in tensors:
        numbers[name][unknown[name]] = 0
        places += _places(name, numbers[name].numpy(), parameters, first)
    return tuple(places)


def _tensors(model: Any) -> list[tuple[str, "torch.Tensor"]]:
    return [(name, tensor) for name, tensor in model.named_parameters() if tensor.is_floating_point()]


def _first_numbers(parameters: Sequence[tuple[str, Shape]]) -> list[int]:
    """The number of each parameter's first element, then the first unused one; 0 stands for padding."""
    first = [1]
    for _, shape in parameters:
        first.append(first[-1] + prod(shape))
    return first


def _digits(
    parameters: Sequence[tuple[str, Shape]], first: Sequence[int], digit: int, like: "torch.Tensor"
) -> Iterator[tuple[str, "torch.Tensor"]]:
    import torch

    for (name, shape), start in zip(parameters, first, strict=False):
        values = torch.arange(start, start + prod(shape), dtype=torch.int64, device=like.device)
        yield name, ((values // BASE**digit) % BASE).to(like.dtype).reshape(shape)


def _places(
    tensor: str, numbers: "Indices", parameters: Sequence[tuple[str, Shape]], first: Sequence[int]
) -> Iterator[Place]:
    """The places in one engine tensor whose elements have ``numbers`` (0: none)."""
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
            region = Region.of(shape, copy_numbers[low:high] - first[index])
            yield _place(name, region, tensor, copy_positions[low:high])


def _copies(positions: "Indices", ordered: "Indices") -> Iterator[tuple["Indices", "Indices"]]:
    """Split a tensor that holds elements several times, so that each part holds one at most once."""
    import numpy as np

    while len(ordered):
        is_first = np.concatenate(([True], np.diff(ordered) != 0))
        yield positions[is_first], ordered[is_first]
        positions, ordered = positions[~is_first], ordered[~is_first]


def _place(name: str, region: Region, tensor: str, positions: "Indices") -> Place:
    import numpy as np
    import torch

    if region.slab is not None:
        sizes = tuple(b - a for a, b in region.slab)
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
            return Place(name, region, tensor, (origin, sizes, strides))
    return Place(name, region, tensor, torch.from_numpy(positions.copy()))
