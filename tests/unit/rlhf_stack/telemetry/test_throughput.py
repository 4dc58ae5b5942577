import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from rlhf_stack.telemetry.throughput import Meter, Work, slow_engines


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_seconds_count_while_any_request_runs() -> None:
    clock = Clock()
    meter = Meter(clock)
    clock.now = 10
    meter.begin()
    clock.now = 11
    meter.begin()
    meter.end(30)
    clock.now = 14
    meter.end(50)
    clock.now = 100
    assert meter.take() == Work(80, 4)
    assert meter.take() == Work(0, 0)


def test_running_request_counts_before_and_after_take() -> None:
    clock = Clock()
    meter = Meter(clock)
    meter.begin()
    clock.now = 2
    assert meter.take() == Work(0, 2)
    clock.now = 5
    meter.end(9)
    assert meter.take() == Work(9, 3)


@pytest.mark.parametrize("fails", [False, True])
def test_last_output_of_a_request_is_counted_and_all_are_yielded(fails: bool) -> None:
    async def outputs() -> AsyncIterator[Any]:
        for length in (1, 2, 4):
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * length)] * 2)
        if fails:
            raise RuntimeError("aborted")

    async def run(meter: Meter) -> int:
        seen = 0
        try:
            async for _ in meter.measured(outputs()):
                seen += 1
        except RuntimeError:
            assert fails
        return seen

    clock = Clock()
    meter = Meter(clock)
    assert asyncio.run(run(meter)) == 3
    assert meter.take().tokens == 8


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([], []),
        ([6000], []),
        ([6000, 6000, 6000, 1500], [3]),
        ([6000, 5000, 3100], []),
        ([1500, 6000, 1400, 6100, 6200], [0, 2]),
        ([6000, 2100], []),
        ([6000, 1500], [1]),
    ],
)
def test_engine_below_half_of_the_median_is_slow(rates: list[int], expected: list[int]) -> None:
    assert slow_engines({index: Work(rate * 10, 10.0) for index, rate in enumerate(rates)}) == expected


def test_engine_with_little_work_is_ignored() -> None:
    assert slow_engines({0: Work(60000, 10.0), 1: Work(60000, 10.0), 2: Work(1, 0.5)}) == []
