"""Throughput of each engine, and which engines are slow."""

import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

SLOW_FRACTION = 0.5  # of the median rate
MIN_SECONDS = 1.0  # of work, below which a rate is meaningless


@dataclass(frozen=True)
class Work:
    """Tokens that an engine generated, and the seconds during which it had requests."""

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second; 0 without work."""
        return self.tokens / self.seconds if self.seconds else 0.0


class Meter:
    """Measures the work of one engine, whose requests overlap."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running = 0
        self._since = 0.0
        self._tokens = 0
        self._seconds = 0.0

    def begin(self) -> None:
        """Record the start of a request."""
        if not self._running:
            self._since = self._clock()
        self._running += 1

    def end(self, tokens: int) -> None:
        """Record the end of a request that generated ``tokens`` tokens."""
        self._running -= 1
        self._tokens += tokens
        if not self._running:
            self._seconds += self._clock() - self._since

    def take(self) -> Work:
        """Return the work since the last call."""
        now = self._clock()
        busy = self._seconds + (now - self._since if self._running else 0.0)
        work = Work(self._tokens, busy)
        self._tokens, self._seconds, self._since = 0, 0.0, now
        return work

    async def measured(self, outputs: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Yield the outputs of one vLLM request and count its tokens; each output has all tokens so far."""
        tokens = 0
        self.begin()
        try:
            async for output in outputs:
                tokens = sum(len(answer.token_ids) for answer in output.outputs)
                yield output
        finally:
            self.end(tokens)


def slow_engines(engines: Mapping[int, Work]) -> list[int]:
    """Return the engines below half of the median rate, ignoring those with less than a second of work."""
    rates = {index: work.rate for index, work in engines.items() if work.seconds >= MIN_SECONDS}
    if len(rates) < 2:
        return []
    median = statistics.median(rates.values())
    return [index for index, rate in rates.items() if rate < SLOW_FRACTION * median]
