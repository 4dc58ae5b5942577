"""The rung ``collectives``: all-reduce, as the trainer's ranks call it, between GPUs."""

import random
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from rlhf_stack.accelerator import devices
from rlhf_stack.certify.ladder import Found, NotClimbedError, Place
from rlhf_stack.certify.model import Measurement
from rlhf_stack.certify.on_cluster import (
    actors,
    answers,
    free_endpoint,
    gpus_of,
    join_group,
    nodes_with_gpus,
)
from rlhf_stack.cluster import assigned_gpu
from rlhf_stack.diagnostics.network_check.model import round_robin
from rlhf_stack.diagnostics.network_check.sampling import Pairs, ring
from rlhf_stack.lazy import ray, torch

SECONDS = 60
REPEATS = 3  # of which the best counts
ELEMENTS, SMALL_ELEMENTS = 1 << 26, 1 << 20
ALL_PAIRS = 8  # GPUs up to which every pair is measured, in 7 rounds
PAIR_SECONDS = 60.0  # in which random pairs of more GPUs are measured, after those that are neighbours


class Member:
    """A rank of groups that are created one after the other."""

    def all_reduce(self, where: tuple[str, int], rank: int, world: int, elements: int) -> tuple[float, bool]:
        """The best seconds of an all-reduce of 32-bit numbers, and whether its sum is correct."""
        import torch.distributed as dist

        assigned_gpu.select()
        device = devices.torch_device()
        join_group(where, rank, world, timeout=timedelta(seconds=SECONDS))
        try:
            taken, correct = [], True
            for _ in range(REPEATS + 1):  # the first one connects
                tensor = torch.arange(elements, dtype=torch.float32, device=device) % 251 + rank
                devices.synchronize()
                start = time.monotonic()
                dist.all_reduce(tensor)
                devices.synchronize()
                taken.append(time.monotonic() - start)
                numbers = torch.arange(elements, dtype=torch.float32, device=device) % 251
                correct &= torch.equal(tensor, numbers * world + world * (world - 1) // 2)
            return min(taken[1:]), correct
        finally:
            dist.destroy_process_group()


def climb(place: Place) -> Found:
    """Measure pairs, those without a common GPU at the same time, then all GPUs together.

    Every pair of `ALL_PAIRS` GPUs; of more every GPU with the next one, and random pairs for a minute.
    """
    with nodes_with_gpus(place) as nodes:
        addresses = gpus_of(nodes)
        if len(addresses) < 2:
            raise NotClimbedError("one GPU: there is no other to exchange data with")
        elements = SMALL_ELEMENTS if place.small else ELEMENTS
        with actors(Member, addresses) as members:

            def measure(several: Pairs) -> list[tuple[float, bool]]:
                return _reduce(members, addresses, several, elements)

            pairs = measured(*rounds(len(addresses)), measure)
            (whole,) = _reduce(members, addresses, [range(len(addresses))], elements)
    names = {pair: f"GPU {pair[0]} and {pair[1]}" for pair in pairs}
    wrong = [names[pair] for pair, (_, correct) in pairs.items() if not correct]
    wrong += [] if whole[1] else ["all GPUs"]
    rates = {names[pair]: rate for pair, (rate, _) in pairs.items()}
    return Found(
        [
            Measurement("slowest pair", min(rates.values()), "GB/s"),
            Measurement("fastest pair", max(rates.values()), "GB/s"),
            Measurement(f"all {len(addresses)} GPUs", whole[0], "GB/s"),
        ],
        {"nodes": addresses, "pairs": chosen(len(addresses), len(pairs)), "GB/s": rates},
        f"wrong sums: {', '.join(wrong)}" if wrong else "",
    )


def rounds(count: int) -> tuple[list[Pairs], list[Pairs]]:
    """Rounds of pairs of ``count`` GPUs that are measured, and further ones in random order."""
    if count <= ALL_PAIRS:
        return round_robin(count), []
    neighbours = ring(count)
    known = {pair for pairs in neighbours for pair in pairs}
    generator = random.Random(count)  # noqa: S311
    order = generator.sample(range(count), count)
    further: list[Pairs] = []
    for pairs in round_robin(count):
        others = [_sorted(order[first], order[second]) for first, second in pairs]
        further.append([pair for pair in others if pair not in known])
    generator.shuffle(further)
    return neighbours, [pairs for pairs in further if pairs]


def _sorted(first: int, second: int) -> tuple[int, int]:
    return min(first, second), max(first, second)


def measured(
    required: Sequence[Pairs], further: Sequence[Pairs], measure: Callable[[Pairs], list[tuple[float, bool]]]
) -> dict[tuple[int, int], tuple[float, bool]]:
    """What ``measure`` returns for each pair: of ``further`` rounds those that a minute has room for."""
    start, longest = time.monotonic(), 0.0
    found: dict[tuple[int, int], tuple[float, bool]] = {}
    for number, pairs in enumerate([*required, *further]):
        begun = time.monotonic()
        if number >= len(required) and begun - start + longest > PAIR_SECONDS:
            break
        found |= dict(zip(pairs, measure(pairs), strict=True))
        longest = max(longest, time.monotonic() - begun)
    return found


def chosen(gpus: int, pairs: int) -> str:
    """Which of the pairs of so many GPUs were measured."""
    if (total := gpus * (gpus - 1) // 2) == pairs:
        return f"all {total}"
    return f"{gpus} of neighbours and {pairs - gpus} at random, of {total}"


def _reduce(
    members: Sequence[Any], addresses: Sequence[str], groups: Sequence[Sequence[int]], elements: int
) -> list[tuple[float, bool]]:
    """For each group, at the same time: the bandwidth of the bus in GB/s, and whether the sum is correct."""
    calls, who = [], []
    for group in groups:
        where = ray.get(members[group[0]].__ray_call__.remote(free_endpoint), timeout=SECONDS)
        for rank, member in enumerate(group):
            calls.append(members[member].all_reduce.remote(where, rank, len(group), elements))
            who.append(f"GPU {member} on {addresses[member]}")
    results = answers(calls, who, 2 * SECONDS)
    found = []
    for group in groups:
        own, results = results[: len(group)], results[len(group) :]
        moved = 2 * (len(group) - 1) / len(group) * 4 * elements  # bytes that each rank sends and receives
        found.append((moved / max(seconds for seconds, _ in own) / 1e9, all(right for _, right in own)))
    return found
