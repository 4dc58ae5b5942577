"""How parameters are cut into buckets: the same on every rank, from their description alone. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

ALIGNMENT = 16  # bytes: any dtype may begin there
LARGE = 1 << 20  # bytes: such a parameter is sent from where it lies


@dataclass(frozen=True)
class Parameter:
    """A parameter as the trainer has it: ``dtype`` is torch's name of it ("bfloat16"), ``size`` its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class Place:
    """Parameter ``index`` (of all) in a bucket, from byte ``begin`` to ``end``."""

    index: int
    begin: int
    end: int


@dataclass(frozen=True)
class Bucket:
    """Parameters that are sent together, in a buffer of ``size`` bytes; ``title`` names it in errors."""

    places: tuple[Place, ...]
    size: int
    title: str

    def parts(self) -> Iterator[tuple[Place, ...]]:
        """Neighbours that are sent as one run of bytes: a large parameter alone, small ones together."""
        small: list[Place] = []
        for place in self.places:
            if place.end - place.begin < LARGE:
                small.append(place)
                continue
            if small:
                yield tuple(small)
                small = []
            yield (place,)
        if small:
            yield tuple(small)


def plan(parameters: Sequence[Parameter], limit: int) -> list[Bucket]:
    """Buckets of at most ``limit`` bytes, in the order of ``parameters``; one that is larger has its own."""
    runs: list[list[Place]] = []
    end = limit + 1
    for index, parameter in enumerate(parameters):
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        if begin + parameter.size > limit:
            runs.append([])
            begin = 0
        end = begin + parameter.size
        runs[-1].append(Place(index, begin, end))
    return [
        Bucket(tuple(run), run[-1].end, _title(number, len(runs), [parameters[place.index] for place in run]))
        for number, run in enumerate(runs, 1)
    ]


def chain(addresses: Sequence[str]) -> list[int]:
    """The order in which ranks hand the weights on, from rank 0: all of a node before those of the next.

    ``addresses`` are those of the ranks' nodes. So the weights enter and leave each node once.
    """
    first = {address: rank for rank, address in reversed(list(enumerate(addresses)))}
    return sorted(range(len(addresses)), key=lambda rank: (first[addresses[rank]], rank))


def total(parameters: Iterable[Parameter]) -> int:
    """Bytes of all ``parameters``."""
    return sum(parameter.size for parameter in parameters)


def _title(number: int, count: int, parameters: Sequence[Parameter]) -> str:
    names = parameters[0].name if len(parameters) == 1 else f"{parameters[0].name} … {parameters[-1].name}"
    return f"bucket {number} of {count} ({names}, {total(parameters)} bytes)"
