"""Checksums of the parameters that engine workers hold, and their comparison with the trainer's."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from rlhf_stack.lazy import torch
from rlhf_stack.sync.weight_layout import Layout, Shape, View, engine_tensors

CHUNK = 1 << 20  # bytes that are summed, and elements that are marked, at a time
WORD = 4  # bytes of a number that is summed
WIDER = "torch.float32"  # has every value of the 16-bit dtypes
FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, so that a product with it loses nothing modulo 2**64


@dataclass(frozen=True)
class RegionDigest:
    """The dtype and checksum of a region of parameter ``name``, as one engine tensor holds it."""

    name: str
    shape: Shape
    region: View
    dtype: str
    checksum: str

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON and msgpack values; ``bounds`` are for people."""
        region = self.region
        return {
            "name": self.name,
            "shape": list(self.shape),
            "bounds": region.bounds(self.shape),
            "region": [region.offset, list(region.sizes), list(region.strides)],
            "dtype": self.dtype,
            "checksum": self.checksum,
        }

    @staticmethod
    def from_dict(value: dict[str, Any]) -> "RegionDigest":
        """Return the inverse of `as_dict`."""
        offset, sizes, strides = value["region"]
        region = View(offset, tuple(sizes), tuple(strides))
        return RegionDigest(value["name"], tuple(value["shape"]), region, value["dtype"], value["checksum"])


@dataclass(frozen=True)
class Difference:
    """A difference from the trainer's parameter in the engine at a position of the trainer's list.

    ``rank`` is None for elements that no rank holds.
    """

    name: str
    engine: int
    rank: int | None
    what: str


def checksum(tensor: "torch.Tensor") -> str:
    """Return 128 bits, in hex, that depend on every bit of a ``tensor`` of any dtype and layout.

    They are two sums of its words, each times an odd number of its position, modulo 2**64: any change of one
    word changes both, and other changes are missed with a probability of about 2**-64. It is computed on the
    tensor's device, in memory of a few `CHUNK`.
    """
    state = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for chunk in _chunks(tensor.detach()):
        content = chunk.contiguous().view(torch.uint8)
        words = torch.zeros(-(-len(content) // WORD), dtype=torch.int32, device=tensor.device)
        words.view(torch.uint8)[: len(content)] = content
        numbers = words.to(torch.int64)
        sums = [(numbers * weights[: len(words)]).sum() for weights in _weights(tensor.device)]
        state = state * FACTOR + torch.stack(sums)
    return "".join(f"{value % (1 << 64):016x}" for value in state.tolist())


def digest_region(tensor: "torch.Tensor", name: str, region: View, dtype: str = "") -> RegionDigest:
    """Return the digest that a worker with ``region`` of the trainer's parameter ``tensor`` must report.

    ``dtype`` is the worker's, if it may be wider, as that of the routers of some models is.
    """
    whole = tensor.detach().contiguous()
    elements = region.select(whole, whole.storage_offset())
    if dtype == WIDER and elements.dtype in (torch.bfloat16, torch.float16):
        elements = elements.float()
    return RegionDigest(name, tuple(tensor.shape), region, str(elements.dtype), checksum(elements))


def digest_model(model: Any, layout: Layout) -> Iterator[RegionDigest]:
    """Yield a digest for each location in ``layout``, from the live weights of the engine's ``model``."""
    tensors = engine_tensors(model)
    for location in layout:
        elements = location.elements.select(tensors[location.tensor])
        dtype = str(elements.dtype)
        yield RegionDigest(location.name, location.shape, location.region, dtype, checksum(elements))


def count_uncovered(shape: Shape, regions: Iterable[View]) -> int:
    """Return how many elements of a parameter of ``shape`` are in none of ``regions``."""
    simplified = {region.simplified() for region in regions}
    count, missing = prod(shape), 0
    for begin in range(0, count, CHUNK):
        end = min(begin + CHUNK, count)
        covered = torch.zeros(end - begin, dtype=torch.bool)
        for part in (part for region in simplified for part in region.within(begin, end)):
            part.shifted(-begin).mark(covered)
        missing += int(covered.numel() - covered.count_nonzero())
    return missing


def differences(
    name: str, tensor: "torch.Tensor", engines: Sequence[Sequence[Sequence[RegionDigest]]]
) -> list[Difference]:
    """Return the differences between the trainer's parameter and the engines' digests, by engine and rank.

    In each engine, every element must be in a region of some rank, and every digest must equal the trainer's.
    """
    found = []
    own: dict[tuple[View, str], RegionDigest] = {}
    for engine, ranks in enumerate(engines):
        regions = [digest.region for digests in ranks for digest in digests]
        missing = count_uncovered(tuple(tensor.shape), regions)
        if missing:
            what = f"{missing} of {tensor.numel()} elements were not found in any rank"
            found.append(Difference(name, engine, None, what))
        for rank, digests in enumerate(ranks):
            for digest in digests:
                key = digest.region, digest.dtype
                if key not in own:
                    own[key] = digest_region(tensor, name, *key)
                expected = own[key]
                if digest != expected:
                    what = (
                        f"{digest.dtype} {digest.checksum[:12]}, "
                        f"trainer {expected.dtype} {expected.checksum[:12]}"
                    )
                    found.append(Difference(name, engine, rank, what))
    return found


def _chunks(tensor: "torch.Tensor") -> Iterator["torch.Tensor"]:
    """Yield the elements in order, as flat tensors of at most `CHUNK` bytes."""
    if tensor.numel() * tensor.element_size() <= CHUNK:
        yield tensor.reshape(-1)
        return
    row = tensor.numel() // len(tensor) * tensor.element_size()
    for part in tensor.split(max(1, CHUNK // row)):
        yield from _chunks(part if len(part) > 1 or row <= CHUNK else part[0])


@cache
def _weights(device: "torch.device") -> tuple["torch.Tensor", ...]:
    """Return an odd number for each word of a chunk, for two sums."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 1 << 62, (2, CHUNK // WORD), generator=generator) * 2 + 1
    return tuple(numbers.to(device))
