"""Which pairs of GPUs the rung of collectives measures."""

from itertools import combinations
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlhf_stack.certify import collectives

Pair = tuple[int, int]


@given(st.integers(2, 40))
def test_every_pair_of_eight_gpus_is_measured_and_neighbours_of_more(count: int) -> None:
    required, further = collectives.rounds(count)
    pairs = [pair for several in (*required, *further) for pair in several]
    assert sorted(pairs) == list(combinations(range(count), 2)), "each pair once"
    for several in (*required, *further):
        gpus = [gpu for pair in several for gpu in pair]
        assert len(gpus) == len({*gpus}), "a GPU is in two pairs at once"
    if count <= collectives.ALL_PAIRS:
        assert further == []
    else:
        neighbours = {(gpu, gpu + 1) for gpu in range(count - 1)} | {(0, count - 1)}
        assert {pair for several in required for pair in several} == neighbours


def test_random_pairs_are_not_those_of_the_lowest_gpus() -> None:
    _, further = collectives.rounds(64)
    assert further[0] != sorted(further[0])
    assert collectives.rounds(64)[1] == further, "the same machine is measured in the same way"


@pytest.mark.parametrize(("seconds", "number"), [(1.0, 25), (20.0, 3), (100.0, 2)])
def test_random_pairs_take_at_most_a_minute(
    monkeypatch: pytest.MonkeyPatch, seconds: float, number: int
) -> None:
    """Neighbours are measured however long that takes."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(collectives, "time", SimpleNamespace(monotonic=lambda: clock.now))
    taken: list[list[Pair]] = []

    def measure(pairs: list[Pair]) -> list[tuple[float, bool]]:
        taken.append(pairs)
        clock.now += seconds
        return [(1.0, True) for _ in pairs]

    required, further = collectives.rounds(24)
    found = collectives.measured(required, further, measure)
    assert len(required) == 2
    assert taken == [*required, *further][:number]
    assert {*found} == {pair for several in taken for pair in several}


def test_the_record_says_which_pairs() -> None:
    assert collectives.chosen(2, 1) == "all 1"
    assert collectives.chosen(8, 28) == "all 28"
    assert collectives.chosen(16, 56) == "16 of neighbours and 40 at random, of 120"
