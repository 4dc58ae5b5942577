"""What a rehearsal found, and what it means: pure functions of what was measured."""

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

OK, SLOW, ONE_WAY, DEAD, WRONG = "ok", "slow", "one way", "cannot talk", "wrong data"
GIGA = 1e9
UNEVEN = 0.5  # of the median, below which one of several links is slow whatever its floor


@dataclass(frozen=True)
class Interface:
    """A network interface that is up; ``network`` as in 10.0.0.0/24, ``megabits`` a second if it says so."""

    name: str
    address: str
    network: str
    megabits: int | None = None


@dataclass(frozen=True)
class Node:
    """A living Ray node; ``used`` is the interface that the backend was told to use, empty if it chose."""

    address: str
    host: str
    interfaces: tuple[Interface, ...] = ()
    used: str = ""


@dataclass(frozen=True)
class Attempt:
    """A group of ranks in which rank 0, on node ``sender``, sent a bucket to the others.

    ``receivers`` are nodes, one a rank; ``seconds`` are those of each receiver for all of ``bytes``.
    ``error`` says what failed, and ``wrong`` which receivers got other bytes than were sent.
    """

    sender: int
    receivers: tuple[int, ...]
    bytes: int = 0
    connect_seconds: float = 0.0
    seconds: tuple[float, ...] = ()
    wrong: tuple[int, ...] = ()
    error: str = ""

    @property
    def rates(self) -> tuple[float, ...]:
        """10^9 bytes a second, for each receiver; none if it failed."""
        return () if self.error else tuple(self.bytes / taken / GIGA for taken in self.seconds)


@dataclass(frozen=True)
class Link:
    """Two nodes and how they talk: rates in 10^9 bytes a second, None in a direction that failed."""

    first: int
    second: int
    forth: float | None
    back: float | None
    verdict: str
    why: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    """All of a rehearsal; ``group`` is the whole group, None if a link failed before it was tried."""

    backend: str
    floor: float
    nodes: tuple[Node, ...]
    links: tuple[Link, ...]
    group: Attempt | None

    @property
    def is_well(self) -> bool:
        """Whether a run on these nodes can sync at a rate above the floor."""
        return (
            all(link.verdict == OK for link in self.links)
            and self.group is not None
            and not self.group.error
            and not self.group.wrong
            and min(self.group.rates, default=0.0) >= self.floor
        )


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """All pairs of ``count`` nodes in rounds, in each of which a node is in one pair at most."""
    seats: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    found = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return [pairs for pairs in found if pairs]


def links(nodes: Sequence[Node], attempts: Iterable[Attempt], floor: float, backend: str) -> tuple[Link, ...]:
    """The verdict on each pair of nodes, by an attempt in each direction."""
    by_direction = {(attempt.sender, attempt.receivers[0]): attempt for attempt in attempts}
    rates = [rate for attempt in by_direction.values() for rate in attempt.rates]
    least = max(floor, UNEVEN * median(rates)) if len(rates) > 2 else floor
    found = []
    for first, second in combinations(range(len(nodes)), 2):
        forth, back = by_direction[first, second], by_direction[second, first]
        verdict, why = _verdict(nodes, forth, back, least)
        remedy = "" if verdict == OK else advice(nodes[first], nodes[second], verdict, backend)
        found.append(Link(first, second, _rate(forth), _rate(back), verdict, why, remedy))
    return tuple(found)


def advice(first: Node, second: Node, verdict: str, backend: str) -> str:
    """What usually mends a link that is not well."""
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    shared = [name for name in common(first, second) if name not in (first.used, second.used)]
    if verdict == WRONG:
        return f"bytes change on the way: check memory and network card of {first.host} and {second.host}"
    if any(ipaddress.ip_address(node.address).is_loopback for node in (first, second)):
        return "a node has a loopback address: start it with ray start --node-ip-address=ITS_OWN"
    if shared and verdict == DEAD:
        return f"set {variable}={shared[0]} on both, for every process: both are in one network there"
    fast = fastest(first, second)
    if verdict == SLOW and fast:
        return f"set {variable}={fast} on both, for every process: it is the fastest network that both are in"
    if verdict == SLOW:
        return "look at this link with iperf3: both nodes are in no faster network together"
    return (
        f"Ray's ports pass between them and others do not: open all ports between {first.address} and "
        f"{second.address} in both directions, or set {variable} to an interface that is open"
    )


def common(first: Node, second: Node) -> list[str]:
    """The interfaces by which both nodes are in one network, under the same name."""
    theirs = {(item.name, item.network) for item in second.interfaces}
    return [item.name for item in first.interfaces if (item.name, item.network) in theirs]


def fastest(first: Node, second: Node) -> str:
    """The common interface with a higher speed than the one by which Ray knows the first node, or ""."""
    speeds = {item.name: item.megabits or 0 for item in first.interfaces}
    now = max((item.megabits or 0 for item in first.interfaces if item.address == first.address), default=0)
    best = max(common(first, second), key=lambda name: speeds[name], default="")
    return best if best and speeds[best] > now else ""


def _rate(attempt: Attempt) -> float | None:
    return attempt.rates[0] if attempt.rates else None


def _verdict(nodes: Sequence[Node], forth: Attempt, back: Attempt, least: float) -> tuple[str, str]:
    failed = [attempt for attempt in (forth, back) if attempt.error]
    why = "; ".join(
        f"{nodes[attempt.sender].host} to {nodes[attempt.receivers[0]].host}: {attempt.error}"
        for attempt in failed
    )
    if failed:
        return (DEAD if len(failed) == 2 else ONE_WAY), why
    if forth.wrong or back.wrong:
        return WRONG, ""
    slow = [
        f"{nodes[attempt.sender].host} to {nodes[attempt.receivers[0]].host}"
        for attempt in (forth, back)
        if attempt.rates[0] < least
    ]
    return (SLOW, f"below {least:.3g} GB/s: {', '.join(slow)}") if slow else (OK, "")
