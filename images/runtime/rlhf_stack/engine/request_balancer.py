"""Which engine gets which prompt: by the work in it and what each engine still has, not by number.

The work of a prompt is its tokens and those that its answers may have at most, since nobody knows how long
they will be. The largest go first, each to the engine that would be done first. Upstream's splits by number
are tried as well and taken if they happen to be better, so that no engine is ever busy for longer than with
them. The same prompts give the same engines; what engines still have is left out where runs have to be
repeatable.
"""

import heapq
from collections.abc import Sequence
from typing import Any, TypeVar

from rlhf_stack.config import env_vars
from rlhf_stack.telemetry import events

ASK_SECONDS = 60.0  # for engines to say what they still have; upstream waits for ever

Result = TypeVar("Result")


def assign(work: Sequence[float], busy: Sequence[float]) -> list[int]:
    """The engine of each prompt, by index; ``busy`` is the work that each engine has already."""
    found = _longest_first(work, busy)
    for other in (_in_pieces(len(work), len(busy)), _in_turn(len(work), len(busy))):
        if makespan(work, busy, other) < makespan(work, busy, found):
            found = other
    return found


def makespan(work: Sequence[float], busy: Sequence[float], engines: Sequence[int]) -> float:
    """The work of the engine that has most of it, if each prompt goes to its entry of ``engines``."""
    loads = list(busy)
    for load, engine in zip(work, engines, strict=True):
        loads[engine] += load
    return max(loads)


def shares(prompts: Sequence[Sequence[int]], answer: int, engines: int) -> list[list[int]]:
    """For each idle engine the indices of its ``prompts`` (tokens); an answer has ``answer`` at most.

    OpenRLHF 0.5 asks for it when a generation begins, which is told here.
    """
    events.begins("generation")
    found: list[list[int]] = [[] for _ in range(engines)]
    work = [len(tokens) + answer for tokens in prompts]
    for prompt, engine in enumerate(assign(work, [0.0] * engines)):
        found[engine].append(prompt)
    return found


def in_order(parts: Sequence[Sequence[int]], answers: Sequence[Sequence[Result]]) -> list[Result]:
    """The answers in the order of the prompts, from those of each of `shares` that is not empty."""
    asked = [index for part in parts for index in part]
    given = [answer for part in answers for answer in part]
    by_prompt = dict(zip(asked, given, strict=True))
    return [by_prompt[index] for index in range(len(asked))]


def engines_of(
    engines: Sequence[Any], prompts: Sequence[str], tokenizer: Any, parameters: Any, limit: int, samples: int
) -> list[int]:
    """The engine of each of ``prompts``, each of which is answered ``samples`` times.

    ``parameters`` are vLLM's ``SamplingParams``; an answer has at most their ``max_tokens`` or, with None,
    what ``limit`` leaves beside its prompt. ``GetTimeoutError`` if an engine does not say what it has.
    """
    import ray

    events.begins("generation")
    busy = [0.0] * len(engines)
    if not env_vars.flag(env_vars.REPEATABLE):
        busy = ray.get([engine.unfinished_work.remote() for engine in engines], timeout=ASK_SECONDS)
    lengths = [len(tokens) for tokens in tokenizer(list(prompts), add_special_tokens=False)["input_ids"]]
    most = [
        max(1, limit - length) if parameters.max_tokens is None else parameters.max_tokens
        for length in lengths
    ]
    work = [samples * (length + answer) for length, answer in zip(lengths, most, strict=True)]
    return assign(work, busy)


def _longest_first(work: Sequence[float], busy: Sequence[float]) -> list[int]:
    heap = [(load, engine) for engine, load in enumerate(busy)]
    heapq.heapify(heap)
    found = [0] * len(work)
    for prompt in sorted(range(len(work)), key=lambda index: (-work[index], index)):
        load, engine = heap[0]
        found[prompt] = engine
        heapq.heapreplace(heap, (load + work[prompt], engine))
    return found


def _in_pieces(prompts: int, engines: int) -> list[int]:
    """OpenRLHF 0.5's: one piece after the other."""
    size = -(-prompts // engines)
    return [prompt // size for prompt in range(prompts)]


def _in_turn(prompts: int, engines: int) -> list[int]:
    """OpenRLHF 0.11's, where no engine has anything yet."""
    return [prompt % engines for prompt in range(prompts)]
