"""The planner's input (free nodes and a request) and output (a plan)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rlhf_stack.errors import UserError

ENGINES = "engines"
ROUNDING = 1e-6  # Ray counts in steps of 1e-4, and its float sums are inexact


class PlacementError(UserError, RuntimeError):
    """A request cannot be placed, or was not reserved in time; the message names what is missing."""


@dataclass(frozen=True)
class FreeNode:
    """The free resources of a live Ray node; ``total_gpus`` is its number of GPUs when nothing runs."""

    address: str
    gpus: float
    cpus: float
    total_gpus: float

    @property
    def bundles(self) -> int:
        """The number of bundles of one GPU and one CPU that fit."""
        return max(0, int(min(self.gpus, self.cpus) + ROUNDING))


@dataclass(frozen=True)
class Group:
    """The ranks of one role, or of roles that share GPUs, as OpenRLHF counts them.

    With ``strict_spread`` its ``nodes`` must be distinct; otherwise only the total number of GPUs counts.
    """

    name: str
    nodes: int
    gpus_per_node: int
    strict_spread: bool = False

    @property
    def size(self) -> int:
        """The number of ranks, each on one GPU."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class Engines:
    """``count`` engines of ``size`` GPUs; ``shares`` names the group whose GPUs they use, if any."""

    count: int
    size: int
    shares: str | None = None


@dataclass(frozen=True)
class Request:
    """All groups and engines of a run.

    ``tp_sp_size`` ranks (tensor parallelism times ring attention) form a block, which should be on one node.
    ``spare_cpus`` must stay free for actors without a bundle.
    """

    groups: tuple[Group, ...] = ()
    engines: Engines | None = None
    tp_sp_size: int = 1
    spare_cpus: int = 0

    @property
    def size(self) -> int:
        """The number of GPUs of all groups and engines."""
        own = self.engines.count * self.engines.size if self.engines and not self.engines.shares else 0
        return own + sum(group.size for group in self.groups)


@dataclass(frozen=True)
class Plan:
    """A placement; nodes are given by their index in the planner's input.

    ``bundles`` has the node of each bundle by group (in rank order), and under `ENGINES` for engines with
    their own GPUs (engine by engine). ``engines`` has the nodes of each engine's workers. ``straddling``
    lists engines that span nodes, which must be allowed explicitly. ``split`` counts blocks that span nodes
    by group.
    """

    bundles: dict[str, tuple[int, ...]] = field(default_factory=dict)
    engines: tuple[tuple[int, ...], ...] = ()
    straddling: tuple[int, ...] = ()
    split: dict[str, int] = field(default_factory=dict)


def largest_node(nodes: Sequence[FreeNode]) -> int:
    """Return the number of GPUs of the largest node when nothing runs."""
    return max((int(node.total_gpus + ROUNDING) for node in nodes), default=0)


def count_fitting(free: Iterable[int], size: int) -> int:
    """Count the units of ``size`` bundles that fit, each on one node with ``free`` bundles."""
    return sum(bundles // size for bundles in free)


def count_split(nodes: Sequence[int], block: int) -> int:
    """Count the blocks of ranks that span nodes, given the node of each rank."""
    return sum(len(set(chunk)) > 1 for chunk in chunks(nodes, block))


def chunks(nodes: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """Split ``nodes`` into chunks of ``size``."""
    return [tuple(nodes[start : start + size]) for start in range(0, len(nodes), size)]
