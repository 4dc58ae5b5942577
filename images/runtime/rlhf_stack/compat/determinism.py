"""Reproducible rollouts for a seed, on request (RLHF_STACK_REPEATABLE=1).

Upstream shuffles prompts with an unseeded generator. Its engines sample all requests from one generator, so
samples depend on when each request arrives, and the trainer takes answers in the order of completion. Here
the shuffle is seeded, each request has its own generator, and answers are taken in the order of their
prompts. This costs throughput: vLLM samples requests that have their own generator one by one.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rlhf_stack.config import env_vars

WAIT_SECONDS = 10.0
SEED_BYTES = 4


class RequestSeeds:
    """Seeds for the requests to one engine, derived from the engine's seed, the prompt and its repetition."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._counts: Counter[bytes] = Counter()

    def next(self, tokens: Sequence[int]) -> int:
        """Return the seed (32 bits) of the next request with the prompt ``tokens``."""
        prompt = repr(list(tokens)).encode()
        self._counts[prompt] += 1
        text = b"%d %d %s" % (self._seed, self._counts[prompt], prompt)
        return int.from_bytes(hashlib.sha256(text).digest()[:SEED_BYTES], "big")


def seed_prompt_shuffle(seed: int) -> None:
    """Seed the shuffle of prompts; upstream seeds only the processes that hold models."""
    if env_vars.flag(env_vars.REPEATABLE):
        import torch

        torch.manual_seed(seed)


def sort_experiences(items: list[Any]) -> None:
    """Sort a critic's experiences in place, if runs must be repeatable: they arrive as ranks finish."""
    if env_vars.flag(env_vars.REPEATABLE):
        items.sort(key=lambda item: list(item.sequences.tolist()))


def wait_for_answer(pending: list[Any]) -> tuple[list[Any], list[Any]]:
    """Wait for one answer; return the ready ones and the rest. If repeatable, wait for the first one only."""
    import ray

    if not env_vars.flag(env_vars.REPEATABLE):
        ready, rest = ray.wait(pending, num_returns=1, timeout=WAIT_SECONDS)
        return list(ready), list(rest)
    ready, _ = ray.wait(pending[:1], timeout=WAIT_SECONDS)
    return list(ready), pending[len(ready) :]
