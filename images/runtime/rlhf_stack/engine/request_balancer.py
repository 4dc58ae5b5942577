"""Assignment of prompts to engines, balanced by expected tokens instead of by the number of prompts.

The work of a prompt is its tokens plus the maximum of its answers, whose length is unknown. Prompts are
assigned in order of decreasing work, each to the engine that would finish first. Upstream's splits by number
are computed too and used if they are better, so no engine is busy for longer than with them. The assignment
is deterministic; if runs must be repeatable, it ignores the unfinished work of engines.
"""

import heapq
from collections.abc import Sequence
from typing import Any, TypeVar

from rlhf_stack.config import env_vars
from rlhf_stack.engine import restarts, roster
from rlhf_stack.telemetry import events

Result = TypeVar("Result")


def assign(work: Sequence[float], busy: Sequence[float]) -> list[int]:
    """Return the index of the engine of each prompt; ``busy`` is the unfinished work of each engine."""
    best = _longest_first(work, busy)
    for other in (_contiguous(len(work), len(busy)), _round_robin(len(work), len(busy))):
        if makespan(work, busy, other) < makespan(work, busy, best):
            best = other
    return best


def makespan(work: Sequence[float], busy: Sequence[float], engines: Sequence[int]) -> float:
    """Return the largest load of an engine if each prompt goes to its entry of ``engines``."""
    loads = list(busy)
    for load, engine in zip(work, engines, strict=True):
        loads[engine] += load
    return max(loads)


def split_prompts(prompts: Sequence[Sequence[int]], answer: int, engines: int) -> list[list[int]]:
    """Return the indices of the ``prompts`` (token lists) of each idle engine.

    An answer has at most ``answer`` tokens. OpenRLHF 0.5 calls this when a generation begins, which is
    recorded here.
    """
    events.begin("generation")
    parts: list[list[int]] = [[] for _ in range(engines)]
    work = [len(tokens) + answer for tokens in prompts]
    for prompt, engine in enumerate(assign(work, [0.0] * engines)):
        parts[engine].append(prompt)
    return parts


def merge_answers(parts: Sequence[Sequence[int]], answers: Sequence[Sequence[Result]]) -> list[Result]:
    """Return the answers in the order of the prompts, given those of each non-empty part."""
    indices = [index for part in parts for index in part]
    by_prompt = dict(zip(indices, (answer for part in answers for answer in part), strict=True))
    return [by_prompt[index] for index in range(len(indices))]


def assign_prompts(
    engines: list[Any], prompts: Sequence[Any], tokenizer: Any, parameters: Any, limit: int, samples: int
) -> list[int]:
    """Return the position of the engine of each of ``prompts``, each of which is answered ``samples`` times.

    ``parameters`` are vLLM's ``SamplingParams``. An answer has at most their ``max_tokens`` or, if None, the
    rest of ``limit`` after its prompt. Raises `SyncError` if an engine does not report its work.
    """
    events.begin("generation")
    return assign_usable(engines, prompts, tokenizer, parameters, limit, samples)


def assign_usable(
    engines: Sequence[Any], prompts: Sequence[Any], tokenizer: Any, parameters: Any, limit: int, samples: int
) -> list[int]:
    """Return `assign_prompts` without an event, after engines without the trainer's weights were dropped.

    If none is left, waits for a restarted engine; `PeerError` if there can be none.
    """
    while not (busy := _unfinished_work(engines)):
        restarts.send_weights_now(engines)
    loads = [0.0] * len(busy) if env_vars.flag(env_vars.REPEATABLE) else busy
    lengths = _lengths(prompts, tokenizer)
    most = [
        max(1, limit - length) if parameters.max_tokens is None else parameters.max_tokens
        for length in lengths
    ]
    work = [samples * (length + answer) for length, answer in zip(lengths, most, strict=True)]
    return assign(work, loads)


def _lengths(prompts: Sequence[Any], tokenizer: Any) -> list[int]:
    """The tokens of the text of each prompt; one that an agent interprets may be any object.

    For models with images ``tokenizer`` is a processor: its first argument is images, and it counts the
    placeholders in the text.
    """
    if hasattr(tokenizer, "image_processor"):
        tokenizer = tokenizer.tokenizer
    texts = [prompt if isinstance(prompt, str) else str(prompt) for prompt in prompts]
    return [len(tokens) for tokens in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def _unfinished_work(engines: Any) -> list[float]:
    team = roster.of(engines)
    for _ in range(2):  # again if all have moved: the actors in the list are dead, others have the weights
        team.put_back_those_with_weights()
        if busy := team.loads():
            return busy
    return []


def _longest_first(work: Sequence[float], busy: Sequence[float]) -> list[int]:
    heap = [(load, engine) for engine, load in enumerate(busy)]
    heapq.heapify(heap)
    engines = [0] * len(work)
    for prompt in sorted(range(len(work)), key=lambda index: (-work[index], index)):
        load, engine = heap[0]
        engines[prompt] = engine
        heapq.heapreplace(heap, (load + work[prompt], engine))
    return engines


def _contiguous(prompts: int, engines: int) -> list[int]:
    """Split as OpenRLHF 0.5: contiguous chunks of equal size."""
    size = -(-prompts // engines)
    return [prompt // size for prompt in range(prompts)]


def _round_robin(prompts: int, engines: int) -> list[int]:
    """Split as OpenRLHF 0.11 among idle engines: round robin."""
    return [prompt % engines for prompt in range(prompts)]
