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
    """Bytes ``begin`` to ``end`` of a bucket, which hold parameter ``index`` (of all) from byte ``start``."""

    index: int
    begin: int
    end: int
    start: int = 0

    @property
    def size(self) -> int:
        """Bytes of the parameter in this bucket."""
        return self.end - self.begin


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
            if span.size < LARGE:
                small.append(span)
                continue
            if small:
                yield tuple(small)
                small = []
            yield (span,)
        if small:
            yield tuple(small)


def plan_buckets(parameters: Sequence[ParameterSpec], limit: int) -> list[Bucket]:
    """Return buckets of at most ``limit`` bytes (16 or more) in the order of ``parameters``.

    A parameter that is larger begins in a new bucket and continues in the next ones.
    """
    limit = max(ALIGNMENT, limit // ALIGNMENT * ALIGNMENT)
    runs: list[list[Span]] = []
    end = limit + 1
    for index, parameter in enumerate(parameters):
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        if begin + parameter.size > limit:
            runs.append([])
            begin = 0
        start = 0
        while parameter.size - start > limit:
            runs[-1].append(Span(index, 0, limit, start))
            runs.append([])
            start += limit
        end = begin + parameter.size - start
        runs[-1].append(Span(index, begin, end, start))
    return [
        Bucket(tuple(run), run[-1].end, _title(number, len(runs), run, parameters))
        for number, run in enumerate(runs, 1)
    ]


def linked_buckets(buckets: Sequence[Bucket]) -> Iterator[list[tuple[int, Bucket]]]:
    """Yield numbered buckets together that share a parameter, so that ZeRO-3 gathers each of them once."""
    linked: list[tuple[int, Bucket]] = []
    for number, bucket in enumerate(buckets):
        if linked and not bucket.spans[0].start:
            yield linked
            linked = []
        linked.append((number, bucket))
    if linked:
        yield linked


def chain_order(addresses: Sequence[str]) -> list[int]:
    """Return the order in which ranks forward the weights, from rank 0 and node by node.

    ``addresses`` are those of the ranks' nodes. With this order the weights enter and leave each node once.
    """
    first = {address: rank for rank, address in reversed(list(enumerate(addresses)))}
    return sorted(range(len(addresses)), key=lambda rank: (first[addresses[rank]], rank))


def total_bytes(parameters: Iterable[ParameterSpec]) -> int:
    """Return the bytes of all ``parameters``."""
    return sum(parameter.size for parameter in parameters)


def _title(number: int, count: int, spans: Sequence[Span], parameters: Sequence[ParameterSpec]) -> str:
    first, last = parameters[spans[0].index].name, parameters[spans[-1].index].name
    names = first if len(spans) == 1 else f"{first} … {last}"
    return f"bucket {number} of {count} ({names}, {sum(span.size for span in spans)} bytes)"
