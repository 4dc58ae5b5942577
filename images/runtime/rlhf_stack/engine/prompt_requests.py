"""Requests for the answers to prompts, which go to other engines if theirs is lost.

Only prompts whose answers have not arrived are generated again: those that the lost engine had not answered,
and those with a large answer, which Ray keeps on the engine's node until it is fetched.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_stack.cluster import actor_registry
from rlhf_stack.compat.determinism import next_attempt, seed_prompt
from rlhf_stack.engine import request_balancer, roster
from rlhf_stack.engine.restarted import NeedsWeightsError
from rlhf_stack.lazy import ray
from rlhf_stack.telemetry import events, run_log

SETTLE_SECONDS = 1.0  # in which the other requests to an engine fail once one has failed


@dataclass
class Request:
    """A call of ``generate_responses`` of an engine of ``engines``; ``answers`` refers to its result."""

    engines: Sequence[Any]
    arguments: dict[str, Any]
    index: int = -1
    engine: Any = None
    answers: Any = None

    def send(self, position: int) -> None:
        """Send the prompt to the engine at ``position``."""
        self.engine = self.engines[position]
        self.index = roster.of(self.engines).index_of(self.engine)
        self.arguments["sampling_params"] = next_attempt(self.arguments["sampling_params"])
        self.answers = self.engine.generate_responses.remote(**self.arguments)


_requests: dict[Any, Request] = {}  # by the reference that the trainer has


def request_answers(engines: Sequence[Any], engine: int, **arguments: Any) -> Any:
    """Return a reference to the answers of ``engines[engine]`` to a prompt, for `answers_of`.

    ``arguments`` are those of upstream's ``RolloutRayActor.generate_responses``.
    """
    arguments["sampling_params"] = seed_prompt(arguments["prompt"], arguments["sampling_params"])
    request = Request(engines, arguments)
    request.send(engine)
    _requests[request.answers] = request
    return request.answers


def answers_of(reference: Any) -> list[Any]:
    """Return the answers that `request_answers` requested.

    If their engine is lost and restarted, has moved, or was unreachable for a while, or if its node was lost
    with the answers, its unanswered prompts go to usable engines first. So do those that reached it after its
    restart. Raises Ray's error if the engine stays dead, and the engine's own error.
    """
    request = _requests[reference]
    while True:
        try:
            answers: list[Any] = ray.get(request.answers)
        except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, NeedsWeightsError) as error:
            unavailable = ray.exceptions.ActorUnavailableError, NeedsWeightsError
            is_restarted = isinstance(error, unavailable) or _is_answer_lost(error)
            if not (is_restarted or roster.has_moved(request.index, request.engine)):
                raise
            _move_prompts(request, error)
        else:
            del _requests[reference]
            return answers


def _move_prompts(lost: Request, error: Exception) -> None:
    """Send the prompts of the engine of ``lost`` whose calls have failed, as that one did, to others."""
    same = [one for one in _requests.values() if one.engines is lost.engines and one.index == lost.index]
    moved = [lost, *(one for one in _failed(same) if one is not lost)]
    if _is_answer_lost(error):
        why = f"an answer of {actor_registry.describe_callee(lost.answers)} was lost with its node"
    elif isinstance(error, NeedsWeightsError):
        why = f"engine {lost.index} was restarted and lacks the trainer's weights"
    else:
        why = actor_registry.describe_lost_actor(error)
    run_log.warning(f"{why}; {len(moved)} prompts without an answer are generated again")
    events.emit("prompts moved", engine=lost.index, prompts=len(moved))
    first = lost.arguments
    engines = request_balancer.assign_usable(
        lost.engines,
        [one.arguments["prompt"] for one in moved],
        first["hf_tokenizer"],
        first["sampling_params"],
        first["max_length"],
        first["num_samples"],
    )
    for one, engine in zip(moved, engines, strict=True):
        one.send(engine)


def _failed(requests: Sequence[Request]) -> Iterable[Request]:
    """Yield those of ``requests`` whose call has failed because its engine was lost."""
    references = [one.answers for one in requests]
    done, _ = ray.wait(references, num_returns=len(references), timeout=SETTLE_SECONDS)
    for one in requests:
        if one.answers in done:
            try:
                ray.get(one.answers)
            except (ray.exceptions.RayActorError, NeedsWeightsError):
                yield one
            except ray.exceptions.ObjectLostError as error:
                if _is_answer_lost(error):
                    yield one


def _is_answer_lost(error: Exception) -> bool:
    """Whether Ray has lost an answer with the node that it was on.

    The exact type decides: subclasses are other faults, such as a dead owner, and what the engine's own code
    has raised.
    """
    known = ray.exceptions
    lost = known.ObjectLostError, known.ObjectFetchTimedOutError, known.ObjectReconstructionFailedError
    return type(error) in lost
