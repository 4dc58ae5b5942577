"""Requests for the answers to prompts, which go to other engines if theirs is lost.

Only prompts that the lost engine had not answered are generated again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_stack.cluster import actor_registry
from rlhf_stack.compat.determinism import seed_prompt
from rlhf_stack.engine import request_balancer, restarts
from rlhf_stack.telemetry import events, run_log

SETTLE_SECONDS = 1.0  # in which the other requests to an engine fail once one has failed


@dataclass
class Request:
    """A call of ``generate_responses`` of ``engines[engine]``; ``answers`` is its result, a reference."""

    engines: Sequence[Any]
    engine: int
    arguments: dict[str, Any]
    answers: Any

    def move(self, engine: int) -> None:
        """Send the prompt to another engine."""
        self.engine = engine
        self.answers = self.engines[engine].generate_responses.remote(**self.arguments)


_requests: dict[Any, Request] = {}  # by the reference that the trainer has


def request_answers(engines: Sequence[Any], engine: int, **arguments: Any) -> Any:
    """Return a reference to the answers of ``engines[engine]`` to a prompt, for `answers_of`.

    ``arguments`` are those of upstream's ``RolloutRayActor.generate_responses``.
    """
    arguments["sampling_params"] = seed_prompt(arguments["prompt"], arguments["sampling_params"])
    reference = engines[engine].generate_responses.remote(**arguments)
    _requests[reference] = Request(engines, engine, arguments, reference)
    return reference


def answers_of(reference: Any) -> list[Any]:
    """Return the answers that `request_answers` requested.

    If their engine is lost and restarted, its unanswered prompts go to other engines first. Raises Ray's
    error if the engine stays dead, and the engine's own error.
    """
    import ray

    request = _requests[reference]
    while True:
        try:
            answers: list[Any] = ray.get(request.answers)
        except ray.exceptions.RayActorError as error:
            if not restarts.is_restarting(error):
                raise
            _move_prompts(request, error)
        else:
            del _requests[reference]
            return answers


def _move_prompts(lost: Request, error: Exception) -> None:
    """Send the prompts of the engine of ``lost`` whose calls have failed, as that one did, to others."""
    same = [one for one in _requests.values() if one.engines is lost.engines and one.engine == lost.engine]
    moved = [lost, *(one for one in _failed(same) if one is not lost)]
    run_log.warning(
        f"{actor_registry.describe_lost_actor(error)}; {len(moved)} prompts that it had not answered "
        "are generated again"
    )
    events.emit("prompts moved", engine=lost.engine, prompts=len(moved))
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
        one.move(engine)


def _failed(requests: Sequence[Request]) -> Iterable[Request]:
    """Yield those of ``requests`` whose call has failed because its engine was lost."""
    import ray

    references = [one.answers for one in requests]
    done, _ = ray.wait(references, num_returns=len(references), timeout=SETTLE_SECONDS)
    for one in requests:
        if one.answers in done:
            try:
                ray.get(one.answers)
            except ray.exceptions.RayActorError:
                yield one
