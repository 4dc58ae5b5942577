"""Waits that end: for answers of Ray's actors, and for an action that may never return."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from rlhf_stack.cluster import actor_registry
from rlhf_stack.config import env_vars
from rlhf_stack.sync.errors import SyncError

POLL_SECONDS = 1.0

Result = TypeVar("Result")


class Background(Generic[Result]):
    """``action`` in a thread of its own, which does not keep the process alive."""

    def __init__(self, action: Callable[[], Result]) -> None:
        self._results: list[Result] = []
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(action,), daemon=True)
        self._thread.start()

    def done(self, seconds: float) -> bool:
        """Whether it has returned or raised, after at most ``seconds``."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> Result:
        """What it returned, as soon as it has; what it raised is raised here."""
        self._thread.join()
        if self._errors:
            raise self._errors[0]
        return self._results[0]

    def _run(self, action: Callable[[], Result]) -> None:
        try:
            self._results.append(action())
        except BaseException as error:  # raised in `result`
            self._errors.append(error)


def wait(references: Sequence[Any], what: str) -> list[Any]:
    """``ray.get`` with the sync deadline; ``what`` is awaited, for the error."""
    return _get(references, env_vars.sync_timeout(), env_vars.SYNC_TIMEOUT, what)


def wait_for_engines(engines: Sequence[Any]) -> None:
    """Until every engine actor is up, so that one that died at its start is known before the rendezvous."""
    references = [engine.__ray_ready__.remote() for engine in engines]
    _get(references, env_vars.engine_timeout(), env_vars.ENGINE_TIMEOUT, "the engines to start")


def wait_for_trainers(references: Sequence[Any], engines: Sequence[Any] | None) -> list[Any]:
    """``ray.get`` of what the trainer's ranks do in a sync, for the process that asked them to.

    A trainer that is stopped tells nobody, but then its engines run into their deadline: their error is
    raised here, or the one with which an engine died. Of a trainer that is dead they know in which bucket.
    """
    import ray

    pending = list(references)
    asked = {engine.sync_error.remote(): engine for engine in engines or []}
    while pending:
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_SECONDS)
        _raise(done, lambda: _told(asked))
        error = _heard(asked) if pending else ""
        if error:
            _end(pending, error)
    results: list[Any] = ray.get(list(references))
    return results


def _raise(done: Sequence[Any], told: Callable[[], str]) -> None:
    """The error of a rank that is ``done``, if one has any; a dead one's with what engines have ``told``."""
    import ray

    try:
        ray.get(done)
    except ray.exceptions.RayTaskError:
        raise
    except ray.exceptions.RayActorError as dead:
        raise actor_registry.PeerError("; ".join(filter(None, (actor_registry.lost(dead), told())))) from dead


def _heard(asked: dict[Any, Any]) -> str:
    """What an engine has answered of a sync that failed, if one has ("" if none); all others are asked again.

    ``asked`` are the engines by the reference of the answer that each still owes.
    """
    import ray

    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0) if asked else ([], [])
    for reference in answered:
        engine = asked.pop(reference)
        try:
            error = ray.get(reference)
        except ray.exceptions.RayActorError as dead:
            error = actor_registry.lost(dead)
        if error:
            return str(error)
        asked[engine.sync_error.remote()] = engine
    return ""


def _told(asked: dict[Any, Any]) -> str:
    """What an engine says of a sync whose trainer is dead ("" if none does in time)."""
    end = time.monotonic() + 3 * env_vars.sync_grace()
    while not (error := _heard(asked)) and asked and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
    return error


def _end(pending: Sequence[Any], error: str) -> None:
    """The trainer's own error if it has one by now, which says more, else that of the engine."""
    import ray

    done, _ = ray.wait(list(pending), num_returns=1, timeout=2 * env_vars.sync_grace())
    _raise(done, lambda: error)
    raise SyncError(error)


def _get(references: Sequence[Any], seconds: float, variable: str, what: str) -> list[Any]:
    import ray

    try:
        with actor_registry.named(f"waiting for {what}"):
            results: list[Any] = ray.get(list(references), timeout=seconds)
    except ray.exceptions.GetTimeoutError as error:
        done, _ = ray.wait(list(references), num_returns=len(references), timeout=0)
        late = [index for index, reference in enumerate(references) if reference not in done]
        raise SyncError(
            f"waited {seconds:g} s for {what}; engines {late} of {len(references)} did not answer "
            f"(deadline: {variable}): {'; '.join(actor_registry.of(references[index]) for index in late)}"
        ) from error
    return results
