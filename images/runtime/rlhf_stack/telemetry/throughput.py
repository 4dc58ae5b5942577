"""How fast each engine generates, and which ones lag behind the others."""

import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

SLOW = 0.5  # of the median
ENOUGH = 1.0  # second of work, below which a rate says nothing


@dataclass(frozen=True)
class Work:
    """Tokens that an engine generated, and the seconds in which it had requests."""

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second; 0 without work."""
        return self.tokens / self.seconds if self.seconds else 0.0


class Meter:
    """Counts the work of one engine, whose requests overlap."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running = 0
        self._since = 0.0
        self._tokens = 0
        self._seconds = 0.0

    def begin(self) -> None:
        """A request starts."""
        if not self._running:
            self._since = self._clock()
        self._running += 1

    def end(self, tokens: int) -> None:
        """A request ends, with so many tokens."""
        self._running -= 1
        self._tokens += tokens
        if not self._running:
            self._seconds += self._clock() - self._since

    def take(self) -> Work:
        """The work since the last call."""
        now = self._clock()
        busy = self._seconds + (now - self._since if self._running else 0.0)
        work = Work(self._tokens, busy)
        self._tokens, self._seconds, self._since = 0, 0.0, now
        return work

    async def measured(self, outputs: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """The outputs of one of vLLM's requests, as they come; each has all tokens so far."""
        tokens = 0
        self.begin()
        try:
            async for output in outputs:
                tokens = sum(len(one.token_ids) for one in output.outputs)
                yield output
        finally:
            self.end(tokens)


def slow(engines: Sequence[Work]) -> list[int]:
    """The engines whose tokens/s are below half of the median; those with hardly any work do not count."""
    rates = {index: work.rate for index, work in enumerate(engines) if work.seconds >= ENOUGH}
    if len(rates) < 2:
        return []
    median = statistics.median(rates.values())
    return [index for index, rate in rates.items() if rate < SLOW * median]
