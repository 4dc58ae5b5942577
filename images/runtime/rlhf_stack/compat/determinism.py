"""Rollouts that a seed repeats, on request (RLHF_STACK_REPEATABLE=1).

Upstream shuffles prompts by a generator that nobody seeded. Its engines draw every token of every request
from one generator, so that what is sampled depends on when each request arrives, and the trainer takes the
answers in the order in which they come. Here the shuffle is seeded, each request has a generator of its own,
and answers are taken in the order of their prompts. It costs throughput: vLLM samples requests with a
generator of their own one by one.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rlhf_stack.config import env_vars

WAIT_SECONDS = 10.0
SEED_BYTES = 4


class RequestSeeds:
    """A seed for each request to one engine, from the engine's own and what was asked before.

    The samples of one prompt are equal but for their order, in which they get their seeds.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._asked: Counter[bytes] = Counter()

    def next(self, tokens: Sequence[int]) -> int:
        """The seed (32 bits) for the next request with the prompt ``tokens``."""
        prompt = repr(list(tokens)).encode()
        self._asked[prompt] += 1
        text = b"%d %d %s" % (self._seed, self._asked[prompt], prompt)
        return int.from_bytes(hashlib.sha256(text).digest()[:SEED_BYTES], "big")


def seed_prompts(seed: int) -> None:
    """Seed what shuffles the prompts; upstream's trainer seeds only where models are."""
    if env_vars.flag(env_vars.REPEATABLE):
        import torch

        torch.manual_seed(seed)


def order(items: list[Any]) -> None:
    """Sort what a critic trains on, in place, if runs have to be repeatable: ranks send it as they finish."""
    if env_vars.flag(env_vars.REPEATABLE):
        items.sort(key=lambda item: list(item.sequences.tolist()))


def wait(pending: list[Any]) -> tuple[list[Any], list[Any]]:
    """Answers that are ready, and the rest, as ``ray.wait`` for one; repeatable: the first or none."""
    import ray

    if not env_vars.flag(env_vars.REPEATABLE):
        ready, rest = ray.wait(pending, num_returns=1, timeout=WAIT_SECONDS)
        return list(ready), list(rest)
    ready, _ = ray.wait(pending[:1], timeout=WAIT_SECONDS)
    return list(ready), pending[len(ready) :]
