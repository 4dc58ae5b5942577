"""Checksums of the parameters that engine workers hold, and their comparison with the trainer's."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_stack.sync.weight_layout import Layout, Region, Shape, engine_tensors

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RegionDigest:
    """The dtype and SHA-256 of a region of parameter ``name``, as one engine tensor holds it."""

    name: str
    region: Region
    dtype: str
    sha256: str

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON and msgpack values."""
        bounds = self.region.bounds
        return {
            "name": self.name,
            "shape": list(self.region.shape),
            "bounds": None if bounds is None else [list(side) for side in bounds],
            "runs": [list(run) for run in self.region.runs],
            "dtype": self.dtype,
            "sha256": self.sha256,
        }

    @staticmethod
    def from_dict(value: dict[str, Any]) -> "RegionDigest":
        """Return the inverse of `as_dict`."""
        bounds = value["bounds"]
        region = Region(
            tuple(value["shape"]),
            None if bounds is None else tuple((a, b) for a, b in bounds),
            tuple((a, b) for a, b in value["runs"]),
        )
        return RegionDigest(value["name"], region, value["dtype"], value["sha256"])


@dataclass(frozen=True)
class Difference:
    """A difference from the trainer's parameter; ``rank`` is None for elements that no rank holds."""

    name: str
    engine: int
    rank: int | None
    what: str


def sha256_of(elements: "torch.Tensor") -> str:
    """Return the SHA-256 of the bytes of a flat tensor of any dtype on any device."""
    import torch

    content = elements.detach().contiguous().view(torch.uint8).cpu()
    return hashlib.sha256(memoryview(content.numpy())).hexdigest()


def digest_region(tensor: "torch.Tensor", name: str, region: Region) -> RegionDigest:
    """Return the digest that a worker with ``region`` of the trainer's parameter ``tensor`` must report."""
    return RegionDigest(name, region, str(tensor.dtype), sha256_of(region.select(tensor.detach())))


def digest_model(model: Any, layout: Layout) -> Iterator[RegionDigest]:
    """Yield a digest for each location in ``layout``, from the live weights of the engine's ``model``."""
    tensors = dict(engine_tensors(model))
    for location in layout:
        tensor = tensors[location.tensor]
        elements = location.read(tensor.detach().reshape(-1))
        yield RegionDigest(location.name, location.region, str(tensor.dtype), sha256_of(elements))


def count_uncovered(shape: Shape, regions: Iterable[Region]) -> int:
    """Return how many elements of a parameter of ``shape`` are in none of ``regions``."""
    import numpy as np

    covered = np.zeros(shape, dtype=bool)
    for region in regions:
        region.mark(covered)
    return int(covered.size - np.count_nonzero(covered))


def differences(
    name: str, tensor: "torch.Tensor", engines: Sequence[Sequence[Sequence[RegionDigest]]]
) -> list[Difference]:
    """Return the differences between the trainer's parameter and the engines' digests, by engine and rank.

    In each engine, every element must be in a region of some rank, and every digest must equal the trainer's.
    """
    found = []
    own: dict[Region, RegionDigest] = {}
    for engine, ranks in enumerate(engines):
        regions = [digest.region for digests in ranks for digest in digests]
        missing = count_uncovered(tuple(tensor.shape), regions)
        if missing:
            what = f"{missing} of {tensor.numel()} elements were not found in any rank"
            found.append(Difference(name, engine, None, what))
        for rank, digests in enumerate(ranks):
            for digest in digests:
                if digest.region not in own:
                    own[digest.region] = digest_region(tensor, name, digest.region)
                expected = own[digest.region]
                if digest != expected:
                    what = (
                        f"{digest.dtype} {digest.sha256[:12]}, "
                        f"trainer {expected.dtype} {expected.sha256[:12]}"
                    )
                    found.append(Difference(name, engine, rank, what))
    return found
