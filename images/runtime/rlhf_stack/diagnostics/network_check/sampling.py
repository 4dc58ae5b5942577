"""Which links a network check tests: every pair of a few nodes; of many a ring, then what narrows a failure.

Pure functions of the results, so that a thousand nodes are simulated in seconds.
"""

from collections.abc import Callable, Iterator, Sequence

from rlhf_stack.diagnostics.network_check.model import (
    OK,
    Attempt,
    CheckedNode,
    Link,
    judge_links,
    round_robin,
)
from rlhf_stack.inputs.text import first_names

ALL_PAIRS = 16  # nodes up to which every pair is tested: 15 rounds in each direction

Pairs = list[tuple[int, int]]
Run = Callable[[Sequence[tuple[int, tuple[int, ...]]]], list[Attempt]]  # groups (sender, receivers) at once


def check_links(
    nodes: Sequence[CheckedNode], run: Run, floor: float | None, backend: str, progress: Callable[[str], None]
) -> tuple[tuple[Link, ...], list[Attempt]]:
    """Test links with ``run`` and return the verdicts and all attempts.

    With more than `ALL_PAIRS` nodes: the links of a ring, then each node of a link that is not well with a
    node whose links are, which distinguishes a node that fails from a link that fails.
    """
    attempts: list[Attempt] = []

    def test(rounds: Sequence[Pairs], what: str) -> tuple[Link, ...]:
        for number, pairs in enumerate(rounds, start=1):
            progress(f"{what} {number} of {len(rounds)}: {_names(nodes, pairs)}")
            attempts.extend(run([(first, (second,)) for first, second in pairs]))
            attempts.extend(run([(second, (first,)) for first, second in pairs]))
        return judge_links(nodes, attempts, floor, backend)

    if len(nodes) <= ALL_PAIRS:
        return test(round_robin(len(nodes)), "round"), attempts
    links = test(ring(len(nodes)), "ring, round")
    if rounds := list(second_opinions(len(nodes), links)):
        links = test(rounds, "second opinion, round")
    return links, attempts


def ring(count: int) -> list[Pairs]:
    """The links of each node with the next one, in two rounds, or three if ``count`` is odd."""
    edges = [(node, (node + 1) % count) for node in range(count)]
    rounds = [edges[0 : count - count % 2 : 2], edges[1 : count - count % 2 : 2]]
    rounds += [[edges[-1]]] if count % 2 else []
    return [[(min(pair), max(pair)) for pair in pairs] for pairs in rounds]


def second_opinions(count: int, links: Sequence[Link]) -> Iterator[Pairs]:
    """Rounds in which each node of a bad link has a new partner, whose links are well."""
    bad = sorted({node for link in links if link.verdict != OK for node in (link.first, link.second)})
    good = [node for node in range(count) if node not in bad]
    tested = {(link.first, link.second) for link in links}
    while bad and good:
        pairs: Pairs = []
        free = list(good)
        for suspect in list(bad):
            partner = next((node for node in free if tuple(sorted((suspect, node))) not in tested), None)
            if partner is None:
                break
            free.remove(partner)
            bad.remove(suspect)
            pairs.append((min(suspect, partner), max(suspect, partner)))
        if not pairs:
            return
        yield pairs


def narrowed(failed: Attempt, run: Run) -> tuple[int, ...]:
    """The fewest receivers with which the group of ``failed`` still fails, halved again and again.

    All of them if it fails only with more than a half.
    """
    receivers = failed.receivers
    while len(set(receivers)) > 1:
        middle = len(receivers) // 2
        halves = receivers[:middle], receivers[middle:]
        bad = next((half for half in halves if half and run([(failed.sender, half)])[0].error), None)
        if bad is None:
            break
        receivers = bad
    return receivers


def _names(nodes: Sequence[CheckedNode], pairs: Pairs) -> str:
    return first_names([f"{nodes[first].host} and {nodes[second].host}" for first, second in pairs], 4)
