"""Division of parameters into buckets, the same on every rank: it depends on their descriptions alone."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

ALIGNMENT = 16  # bytes: a multiple of every dtype's size
LARGE = 1 << 20  # bytes: a parameter of this size is sent from its own memory, without a copy into the bucket


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter of an engine: ``dtype`` is its name in torch ("bfloat16"), ``size`` is in bytes.

    ``fused`` names the trainer's parameter of which this one and its neighbours are parts, if it is one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    fused: str = ""


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


@dataclass(frozen=True)
class Share:
    """What a trainer rank sends: of ``count`` consecutive buckets the one at ``index``."""

    index: int = 0
    count: int = 1

    def of(self, count: int) -> "Share":
        """Return the share if there are ``count`` buckets: fewer ranks may then send."""
        return Share(self.index, max(1, min(self.count, count)))

    def has(self, number: int) -> bool:
        """Report whether bucket ``number`` belongs to it."""
        return number % self.count == self.index


def plan_buckets(parameters: Sequence[ParameterSpec], limit: int) -> list[Bucket]:
    """Return buckets of at most ``limit`` bytes (16 or more) in the order of ``parameters``.

    A parameter that is larger begins in a new bucket and continues in the next ones. So do the parts of a
    fused one: what a bucket shares with the one before is of one parameter of the trainer.
    """
    limit = max(ALIGNMENT, limit // ALIGNMENT * ALIGNMENT)
    runs: list[list[Span]] = []
    end = limit + 1
    together = dict(_fused_sizes(parameters))
    for index, parameter in enumerate(parameters):
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        if begin + together.get(index, parameter.size) > limit:
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


def _fused_sizes(parameters: Sequence[ParameterSpec]) -> Iterator[tuple[int, int]]:
    """Yield the index of the first part of each fused parameter, and the room that all of its parts take."""
    by_fused = groupby(enumerate(parameters), key=lambda each: each[1].fused)
    for parts in (list(parts) for fused, parts in by_fused if fused):
        yield parts[0][0], sum(-(-each.size // ALIGNMENT) * ALIGNMENT for _, each in parts)


def linked_buckets(
    buckets: Sequence[Bucket], parameters: Sequence[ParameterSpec]
) -> Iterator[list[tuple[int, Bucket]]]:
    """Yield numbered buckets together that share a trainer's parameter: ZeRO-3 gathers each of them once."""
    linked: list[tuple[int, Bucket]] = []
    for number, bucket in enumerate(buckets):
        first = bucket.spans[0]
        before = linked[-1][1].spans[-1].index if linked else first.index
        is_part = parameters[first.index].fused and parameters[first.index].fused == parameters[before].fused
        if linked and not first.start and not is_part:
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
