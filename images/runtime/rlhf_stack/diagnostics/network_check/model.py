"""The results of a network check and the verdicts on them: pure functions of the measurements."""

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

OK, SLOW, ONE_WAY, DEAD, WRONG = "ok", "slow", "one way", "cannot talk", "wrong data"
GIGA = 1e9
UNEVEN = 0.5  # of the median: a link below it is slow, even above the floor
DEFAULT_FLOOR = 0.1  # 10^9 bytes/s, about 1 Gbit/s
# A tenth leaves room for other load, for RDMA through host memory, and for an adapter that is slower than the
# fastest of its node. TCP instead of RDMA, reported as 40 times slower, is below it. Well-tuned TCP is not
# (vllm-project/vllm#42075): `rlhf-stack doctor` reports that.
SPEED_SHARE = 0.1
# gloo sends over one TCP connection, whose rate does not grow with that of the link: EC2 allows it 5 Gbit/s.
TCP_FLOOR = 0.5
GIGABYTES_PER_MEGABIT = 1e6 / 8 / GIGA


@dataclass(frozen=True)
class Interface:
    """A network interface that is up; ``network`` such as 10.0.0.0/24.

    ``megabits`` per second, None if unknown, as for a virtual interface.
    """

    name: str
    address: str
    network: str
    megabits: int | None = None


@dataclass(frozen=True)
class CheckedNode:
    """A live Ray node; ``used`` is the interface configured for the backend, empty by default.

    ``rdma_megabits`` is the speed of its fastest RDMA adapter that NCCL may use, in Mbit/s, None without one.
    """

    address: str
    host: str
    interfaces: tuple[Interface, ...] = ()
    used: str = ""
    rdma_megabits: int | None = None


@dataclass(frozen=True)
class Attempt:
    """A process group in which rank 0, on node ``sender``, sent a bucket of ``bytes`` to the other ranks.

    ``receivers`` has the node of each other rank, ``seconds`` the transfer time of each. ``error`` is the
    failure, if any; ``wrong`` are the nodes that received corrupted data.
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
        """The rate of each receiver in 10^9 bytes/s; empty after a failure."""
        return () if self.error else tuple(self.bytes / taken / GIGA for taken in self.seconds)


@dataclass(frozen=True)
class Link:
    """The link of two nodes: the rate in each direction in 10^9 bytes/s, None if it failed.

    ``floor`` is the rate below which this link is slow, in 10^9 bytes/s.
    """

    first: int
    second: int
    forth: float | None
    back: float | None
    verdict: str
    why: str = ""
    remedy: str = ""
    floor: float = 0.0


@dataclass(frozen=True)
class NetworkReport:
    """The result of a network check; ``group`` is the whole group, None if a link failed first.

    ``floor`` in 10^9 bytes/s applies to every link and to the group.
    """

    backend: str
    floor: float
    nodes: tuple[CheckedNode, ...]
    links: tuple[Link, ...]
    group: Attempt | None

    @property
    def is_well(self) -> bool:
        """Whether a run on these nodes can sync at or above the floor."""
        return (
            all(link.verdict == OK for link in self.links)
            and self.group is not None
            and not self.group.error
            and not self.group.wrong
            and min(self.group.rates, default=0.0) >= self.floor
        )


def round_robin(count: int) -> list[list[tuple[int, int]]]:
    """All pairs of ``count`` nodes, in rounds in which each node has at most one partner."""
    seats: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    found = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return [pairs for pairs in found if pairs]


def judge_links(
    nodes: Sequence[CheckedNode], attempts: Iterable[Attempt], floor: float | None, backend: str
) -> tuple[Link, ...]:
    """Judge each pair of nodes that was tested, by an attempt in each direction.

    ``floor`` in 10^9 bytes/s; None is `DEFAULT_FLOOR`, or more on a link of known speed (`speed_floor`).
    """
    by_direction = {(attempt.sender, attempt.receivers[0]): attempt for attempt in attempts}
    rates = [rate for attempt in by_direction.values() for rate in attempt.rates]
    general = [(DEFAULT_FLOOR if floor is None else floor, "")]
    if len(rates) > 2:
        general.append((UNEVEN * median(rates), "half of the median"))
    found = []
    for first, second in sorted(pair for pair in by_direction if pair[0] < pair[1]):
        forth, back = by_direction[first, second], by_direction[second, first]
        by_speed = [speed_floor(nodes[first], nodes[second], backend)] if floor is None else []
        least, reason = max(general + by_speed)
        verdict, why = _verdict(nodes, forth, back, least, reason)
        remedy = "" if verdict == OK else link_remedy(nodes[first], nodes[second], verdict, backend)
        found.append(Link(first, second, _rate(forth), _rate(back), verdict, why, remedy, least))
    return tuple(found)


def speed_floor(first: CheckedNode, second: CheckedNode, backend: str) -> tuple[float, str]:
    """The least rate of a link in 10^9 bytes/s for its speed, with its derivation; (0.0, "") if unknown.

    With NCCL and RDMA adapters on both nodes this is the speed of RDMA, otherwise that of their interfaces.
    """
    if backend == "nccl" and first.rdma_megabits and second.rdma_megabits:
        megabits = min(first.rdma_megabits, second.rdma_megabits)
        return SPEED_SHARE * megabits * GIGABYTES_PER_MEGABIT, _share("RDMA", megabits)
    speeds = [interface.megabits for node in (first, second) if (interface := used_interface(node))]
    known = [megabits for megabits in speeds if megabits]
    if len(known) < 2:
        return 0.0, ""
    share = SPEED_SHARE * min(known) * GIGABYTES_PER_MEGABIT
    if share > TCP_FLOOR:
        return TCP_FLOOR, f"the least of a TCP connection at {min(known) / 1000:g} Gbit/s"
    return share, _share("the link", min(known))


def used_interface(node: CheckedNode) -> Interface | None:
    """The interface of a node that is configured for the backend, otherwise that of its Ray address."""
    name = node.used.partition(",")[0].lstrip("=")
    if name and not name.startswith("^"):
        return next((each for each in node.interfaces if each.name.startswith(name)), None)
    return next((each for each in node.interfaces if each.address == node.address), None)


def _share(what: str, megabits: int) -> str:
    return f"{SPEED_SHARE:.0%} of the {megabits / 1000:g} Gbit/s of {what}"


def link_remedy(first: CheckedNode, second: CheckedNode, verdict: str, backend: str) -> str:
    """The usual remedy for a link with ``verdict``."""
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    shared = [name for name in common_interfaces(first, second) if name not in (first.used, second.used)]
    if verdict == WRONG:
        return (
            f"data is corrupted in transit: check memory and network card of {first.host} and {second.host}"
        )
    if any(ipaddress.ip_address(node.address).is_loopback for node in (first, second)):
        return "a node has a loopback address: start it with ray start --node-ip-address=ADDRESS"
    if shared and verdict == DEAD:
        return f"set {variable}={shared[0]} on both, for every process: it connects both nodes to one network"
    if verdict == SLOW:
        return _slow_remedy(first, second, backend)
    return (
        f"Ray's ports are open, others are blocked: open all ports between {first.address} and "
        f"{second.address} in both directions, or set {variable} to an interface without a firewall"
    )


def _slow_remedy(first: CheckedNode, second: CheckedNode, backend: str) -> str:
    if backend == "nccl" and first.rdma_megabits and second.rdma_megabits:
        return (
            f"run `rlhf-stack doctor` on {first.host} and {second.host}: it reports what prevents RDMA. With "
            "NCCL_DEBUG=INFO, NCCL logs 'Using network Socket' if it uses TCP; else measure with ib_write_bw"
        )
    fast = fastest_common_interface(first, second)
    if fast:
        variable = f"{backend.upper()}_SOCKET_IFNAME"
        return f"set {variable}={fast} on both, for every process: it is their fastest common network"
    return "measure this link with iperf3: the nodes have no faster common network"


def common_interfaces(first: CheckedNode, second: CheckedNode) -> list[str]:
    """The interfaces with the same name and network on both nodes."""
    theirs = {(item.name, item.network) for item in second.interfaces}
    return [item.name for item in first.interfaces if (item.name, item.network) in theirs]


def fastest_common_interface(first: CheckedNode, second: CheckedNode) -> str:
    """The fastest common interface, if it is faster than the one of the first node's Ray address, or ""."""
    speeds = {item.name: item.megabits or 0 for item in first.interfaces}
    now = max((item.megabits or 0 for item in first.interfaces if item.address == first.address), default=0)
    best = max(common_interfaces(first, second), key=lambda name: speeds[name], default="")
    return best if best and speeds[best] > now else ""


def _rate(attempt: Attempt) -> float | None:
    return attempt.rates[0] if attempt.rates else None


def _verdict(
    nodes: Sequence[CheckedNode], forth: Attempt, back: Attempt, least: float, reason: str
) -> tuple[str, str]:
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
        f"{nodes[attempt.sender].host} to {nodes[attempt.receivers[0]].host} {attempt.rates[0]:.3g} GB/s"
        for attempt in (forth, back)
        if attempt.rates[0] < least
    ]
    below = f"below {least:.3g} GB/s" + (f", {reason}" if reason else "")
    return (SLOW, f"{below}: {', '.join(slow)}") if slow else (OK, "")
