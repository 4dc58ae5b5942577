"""The attempts of a supervised run, and the rule that decides whether there is another one."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SUCCEEDED, FAILED, STOPPED, HEAD_LOST = "SUCCEEDED", "FAILED", "STOPPED", "HEAD LOST"
WRONG_USAGE = 2
FAILURES_OF_A_NODE = 2  # after which the next attempt does not use it
OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|out of memory\b|No available memory for the cache blocks")
UNPLACED = re.compile(r"\bPlacementError\b")
OF_THE_CLUSTER = re.compile(r"\b(?:PeerError|PlacementError)\b")  # a lost rank or node, or too few nodes
VARIES = re.compile(r"0x[0-9a-f]+|\b[0-9a-f]{16,}\b|\d+(?:\.\d+)*")


@dataclass(frozen=True)
class Attempt:
    """One job of a run.

    It began at step ``resumed`` + 1 and ended when the checkpoint of step ``saved`` was the last complete one
    (0: none). ``lost`` are the addresses of nodes that ended during it or did not answer at its end, except
    those that the autoscaler removed because they were idle. ``causes`` are known causes in its output that
    the versions and settings of this image confirm. Before it the run was not running for ``waited`` seconds,
    and ``changed`` is what differs from the attempt before.
    """

    job: str
    status: str
    code: int
    seconds: float
    resumed: int
    saved: int
    error: str = ""
    lost: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    waited: float = 0.0
    changed: tuple[str, ...] = ()


def why_not_again(attempts: Sequence[Attempt], restarts: int) -> str | None:
    """Return why the run is not submitted again after its last attempt, None if it is.

    Whatever would fail again in the same way is not repeated: a rejected command line, a confirmed known
    cause, memory that was exhausted before any progress, or the same error of the program in two attempts in
    sequence of which neither made progress. Errors of the cluster are repeated up to ``restarts`` times.
    """
    last = attempts[-1]
    if last.status == STOPPED:
        return "it was stopped by a user"
    if len(attempts) > restarts:
        return f"{restarts} of {restarts} restarts are used"
    if last.code == WRONG_USAGE:
        return "its command line was rejected"
    if _lost_machines(last):
        return None
    return next(_permanent_causes(attempts), None)


def _permanent_causes(attempts: Sequence[Attempt]) -> Iterator[str]:
    """Yield why the last attempt, which lost no node, would fail again."""
    last, before = attempts[-1], attempts[-2] if len(attempts) > 1 else None
    if last.causes:
        yield f"the cause is not transient: {last.causes[0]}"
    if last.saved > last.resumed:
        return
    if OUT_OF_MEMORY.search(last.error):
        yield "it ran out of memory before it saved a checkpoint, and would do so again"
    if before is None or before.saved > before.resumed or _lost_machines(before):
        return
    is_same = last.error and kind_of(before.error) == kind_of(last.error)
    if is_same and not OF_THE_CLUSTER.search(last.error):
        yield f"it failed twice with the same error and without progress after step {last.resumed}"


def _lost_machines(attempt: Attempt) -> bool:
    return bool(attempt.lost) or attempt.status == HEAD_LOST


def is_unplaced(attempt: Attempt) -> bool:
    """Return whether the attempt ended because the cluster had no room for it while it waited."""
    return bool(UNPLACED.search(attempt.error))


def excluded_nodes(attempts: Sequence[Attempt]) -> list[str]:
    """Return the nodes that were lost so often that the next attempt does not use them."""
    counts = Counter(address for attempt in attempts for address in attempt.lost)
    return sorted(address for address, count in counts.items() if count >= FAILURES_OF_A_NODE)


def kind_of(error: str) -> str:
    """Return an error without the numbers and addresses that differ between two attempts."""
    return VARIES.sub("#", error)
