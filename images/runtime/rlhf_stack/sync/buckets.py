"""Division of parameters into buckets, the same on every rank: it depends on their descriptions alone."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

ALIGNMENT = 16  # bytes: a multiple of every dtype's size
LARGE = 1 << 20  # bytes: a parameter of this size is sent from its own memory, without a copy into the bucket


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter of the trainer: ``dtype`` is its name in torch ("bfloat16"), ``size`` is in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class Span:
    """Bytes ``begin`` to ``end`` of a bucket, which hold parameter ``index`` (of all parameters)."""

    index: int
    begin: int
    end: int


@dataclass(frozen=True)
class Bucket:
    """Parameters that are sent together, in a buffer of ``size`` bytes; ``title`` names it in errors."""

    spans: tuple[Span, ...]
    size: int
    title: str

    def parts(self) -> Iterator[tuple[Span, ...]]:
        """Yield adjacent spans that are sent as one part: a large parameter alone, small ones together."""
        small: list[Span] = []
        for span in self.spans:
            if span.end - span.begin < LARGE:
                small.append(span)
                continue
            if small:
                yield tuple(small)
                small = []
            yield (span,)
        if small:
            yield tuple(small)


def plan_buckets(parameters: Sequence[ParameterSpec], limit: int) -> list[Bucket]:
    """Return buckets of at most ``limit`` bytes in the order of ``parameters``; a larger one has its own."""
    runs: list[list[Span]] = []
    end = limit + 1
    for index, parameter in enumerate(parameters):
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        if begin + parameter.size > limit:
            runs.append([])
            begin = 0
        end = begin + parameter.size
        runs[-1].append(Span(index, begin, end))
    return [
        Bucket(tuple(run), run[-1].end, _title(number, len(runs), [parameters[span.index] for span in run]))
        for number, run in enumerate(runs, 1)
    ]


def chain_order(addresses: Sequence[str]) -> list[int]:
    """Return the order in which ranks forward the weights, from rank 0 and node by node.

    ``addresses`` are those of the ranks' nodes. With this order the weights enter and leave each node once.
    """
    first = {address: rank for rank, address in reversed(list(enumerate(addresses)))}
    return sorted(range(len(addresses)), key=lambda rank: (first[addresses[rank]], rank))


def total_bytes(parameters: Iterable[ParameterSpec]) -> int:
    """Return the bytes of all ``parameters``."""
    return sum(parameter.size for parameter in parameters)


def _title(number: int, count: int, parameters: Sequence[ParameterSpec]) -> str:
    names = parameters[0].name if len(parameters) == 1 else f"{parameters[0].name} … {parameters[-1].name}"
    return f"bucket {number} of {count} ({names}, {total_bytes(parameters)} bytes)"
