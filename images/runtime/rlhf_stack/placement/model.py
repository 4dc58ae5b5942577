"""What is planned on, what is asked for, and what a plan says."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rlhf_stack.errors import UserError

ENGINES = "engines"
ROUNDING = 1e-6  # Ray counts in steps of 1e-4, and its sums of floats are a little off


class PlacementError(UserError, RuntimeError):
    """What was asked for cannot be placed, or was not in time; the text says what is missing."""


@dataclass(frozen=True)
class FreeNode:
    """What a living Ray node has left; ``total_gpus`` is what it has when nothing runs."""

    address: str
    gpus: float
    cpus: float
    total_gpus: float

    @property
    def bundles(self) -> int:
        """How many bundles of one GPU and one CPU fit."""
        return max(0, int(min(self.gpus, self.cpus) + ROUNDING))


@dataclass(frozen=True)
class Group:
    """The ranks of one role, or of roles that share GPUs, as OpenRLHF counts them.

    ``spread``: each of its ``nodes`` has to be another one; else only their number of GPUs counts.
    """

    name: str
    nodes: int
    gpus_per_node: int
    spread: bool = False

    @property
    def size(self) -> int:
        """Ranks in the group, each on a GPU."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class Engines:
    """``count`` engines of ``size`` GPUs; ``shares`` names the group whose GPUs they use, if any.

    ``apart``: each has a placement group of its own in Ray, all of which vLLM 0.4 uses.
    """

    count: int
    size: int
    shares: str | None = None
    apart: bool = False


@dataclass(frozen=True)
class Request:
    """All that a run places.

    ``block`` ranks (tensor parallelism times ring attention) of a group ought to be on one node.
    ``spare_cpus`` must stay free for actors that have no bundle.
    """

    groups: tuple[Group, ...] = ()
    engines: Engines | None = None
    block: int = 1
    spare_cpus: int = 0

    @property
    def size(self) -> int:
        """GPUs in all."""
        own = self.engines.count * self.engines.size if self.engines and not self.engines.shares else 0
        return own + sum(group.size for group in self.groups)


@dataclass(frozen=True)
class Plan:
    """Nodes are given by their index in what was planned on.

    ``bundles`` has the node of each bundle by group (rank order) and of `ENGINES` with GPUs of their own
    (engine after engine). ``engines`` are the nodes of each engine's workers. ``straddling`` engines could
    not be kept on a node, which only happens on request. ``split`` counts blocks across nodes by group.
    """

    bundles: dict[str, tuple[int, ...]] = field(default_factory=dict)
    engines: tuple[tuple[int, ...], ...] = ()
    straddling: tuple[int, ...] = ()
    split: dict[str, int] = field(default_factory=dict)


def largest(nodes: Sequence[FreeNode]) -> int:
    """GPUs of the largest node when nothing runs."""
    return max((int(node.total_gpus + ROUNDING) for node in nodes), default=0)


def fitting(free: Iterable[int], size: int) -> int:
    """How many units of ``size`` bundles fit, each on one node."""
    return sum(bundles // size for bundles in free)


def across(nodes: Sequence[int], block: int) -> int:
    """How many blocks of ranks, given the node of each rank, are not on one node."""
    return sum(len(set(one)) > 1 for one in chunks(nodes, block))


def chunks(nodes: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """``nodes`` in pieces of ``size``."""
    return [tuple(nodes[start : start + size]) for start in range(0, len(nodes), size)]
