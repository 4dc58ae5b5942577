"""Reproducible runs for a seed, on request (RLHF_STACK_REPEATABLE=1).

Upstream shuffles prompts with an unseeded generator. Its engines sample all requests from one generator, so
samples depend on when each request arrives, and the trainer takes answers in the order of completion. Here
the shuffle is seeded, each request has its own generator, and answers are taken in the order of their
prompts. This costs throughput: vLLM samples requests that have their own generator one by one.

A checkpoint of OpenRLHF has no state of a generator. So that a run that was continued or that lost an engine
is the same run, the seed of a request follows from the step and the prompt and not from its engine, and the
order in which a rank trains its samples follows from these samples. The optimiser's: see `adam_history`.
With OpenRLHF 0.5, whose engines are not restarted, the seed follows from rank and engine too.
"""

import copy
import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rlhf_stack.compat import adam_history
from rlhf_stack.config import env_vars

WAIT_SECONDS = 10.0
SEED_BYTES = 4
BASE, ATTEMPT = "rlhf_stack_seed", "rlhf_stack_attempt"  # in extra_args of vLLM's SamplingParams


class Rollout:
    """Seeds for the prompts of the trainer's process, derived from the run's seed and the step before."""

    def __init__(self) -> None:
        self.seed = 0
        self._step = 0
        self._counts: Counter[str] = Counter()

    def ended(self, step: int) -> None:
        """Note that ``step`` is the last step that has ended; the counts of its prompts are dropped."""
        self._step = step
        self._counts.clear()

    def next(self, prompt: str) -> int:
        """Return the seed of the next request with ``prompt`` (its text) in this step."""
        self._counts[prompt] += 1
        return _seed(f"{self.seed} {self._step} {self._counts[prompt]} {prompt}".encode())


rollout = Rollout()  # of the trainer's controller; of a rank of OpenRLHF 0.5, which asks once for a batch


class RequestSeeds:
    """Seeds for the requests to one engine, derived from a base, the prompt and its repetition.

    The base is that of the request, if the trainer gives one, otherwise the engine's ``seed``. A request that
    was sent again has the seeds of its first attempt, also if this engine executed that one.
    """

    def __init__(self, seed: int | str) -> None:
        self._seed = seed
        self._counts: Counter[bytes] = Counter()

    def next(self, tokens: Sequence[int], base: int | None = None, attempt: int = 1) -> int:
        """Return the seed (32 bits) of the next request with this prompt, base and attempt."""
        origin = f"engine {self._seed}" if base is None else f"trainer {base}"
        prompt = f"{origin} {list(tokens)}".encode()
        key = hashlib.sha256(b"%d %s" % (attempt, prompt)).digest()
        self._counts[key] += 1
        return _seed(b"%d %s" % (self._counts[key], prompt))


def seed_prompt_shuffle(seed: int) -> None:
    """Seed the shuffle of prompts; upstream seeds only the processes that hold models."""
    if env_vars.flag(env_vars.REPEATABLE):
        import torch

        rollout.seed = seed
        torch.manual_seed(seed)


def continues_from(load: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Decorate the trainer's method that loads the states of a checkpoint: its step has ended.

    If that step drained the loader of prompts, the run continues with the next episode. Upstream repeats the
    whole one: torchdata's loader begins a new pass from such a state, in the order of the next episode. So
    does a run that generates several batches at a time, of which the drained ones may not have been trained.
    """

    @functools.wraps(load)
    def loaded(*arguments: Any, **options: Any) -> dict[str, Any]:
        states = load(*arguments, **options)
        rollout.ended(int(states["global_step"]))
        if states.get("data_loader_state_dict", {}).get("_iterator_finished"):
            batches = arguments[0].args.rollout
            states["episode"] += batches.vllm_generate_batch_size <= batches.batch_size
        return states

    return loaded


def begin_rollout(step: int) -> None:
    """Note that this rank of OpenRLHF 0.5 generates the batch of ``step``."""
    rollout.ended(step - 1)


def rollout_seed(seed: int, rank: int) -> int | None:
    """Return the base of the seeds of a batch that ``rank`` of OpenRLHF 0.5 sends to its engines.

    ``seed`` is the run's. None unless runs must be repeatable.
    """
    if not env_vars.flag(env_vars.REPEATABLE):
        return None
    rollout.seed = seed
    return rollout.next(f"rank {rank}")


def seed_prompt(prompt: Any, parameters: Any) -> Any:
    """Return vLLM's ``SamplingParams`` with the base of the prompt's seeds, if runs must be repeatable.

    A prompt that an agent interprets may be any object.
    """
    if not env_vars.flag(env_vars.REPEATABLE) or parameters.seed is not None:
        return parameters
    seeded = copy.copy(parameters)
    seeded.extra_args = (parameters.extra_args or {}) | {BASE: rollout.next(str(prompt))}
    return seeded


def next_attempt(parameters: Any) -> Any:
    """Return ``parameters`` of `seed_prompt` for the next attempt to send the prompt, from 1."""
    given = parameters.extra_args or {}
    if BASE not in given:
        return parameters
    numbered = copy.copy(parameters)
    numbered.extra_args = given | {ATTEMPT: given.get(ATTEMPT, 0) + 1}
    return numbered


def seed_training(replay_buffer: Any, optimizer: Any) -> None:
    """Seed the order in which this rank trains the samples of ``replay_buffer``, from these samples.

    An ``optimizer`` from a checkpoint gets the state that it has in the undisturbed run.
    """
    if not env_vars.flag(env_vars.REPEATABLE):
        return
    import torch

    adam_history.replay_steps(optimizer)

    texts = [repr(item.sequences.tolist()).encode() for item in replay_buffer.items]
    torch.manual_seed(_seed(b" ".join(texts)))


def sort_experiences(items: list[Any]) -> None:
    """Sort a critic's experiences in place, if runs must be repeatable: they arrive as ranks finish.

    Two ranks can have the same sequence, whose values differ in their last digits.
    """
    if env_vars.flag(env_vars.REPEATABLE):
        items.sort(key=lambda item: [each.tolist() for each in (item.sequences, item.values, item.returns)])


def wait_for_answer(pending: list[Any]) -> tuple[list[Any], list[Any]]:
    """Wait for one answer; return the ready ones and the rest. If repeatable, wait for the first one only."""
    import ray

    if not env_vars.flag(env_vars.REPEATABLE):
        ready, rest = ray.wait(pending, num_returns=1, timeout=WAIT_SECONDS)
        return list(ready), list(rest)
    ready, _ = ray.wait(pending[:1], timeout=WAIT_SECONDS)
    return list(ready), pending[len(ready) :]


def _seed(text: bytes) -> int:
    return int.from_bytes(hashlib.sha256(text).digest()[:SEED_BYTES], "big")
