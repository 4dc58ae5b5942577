"""Waits for the Ray actors of a sync, engines and trainer ranks, none of which waits forever."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from rlhf_stack.cluster import actor_registry, answer_once
from rlhf_stack.compat import ray_private
from rlhf_stack.config import env_vars
from rlhf_stack.lazy import ray
from rlhf_stack.sync.errors import SyncError

POLL_SECONDS = 1.0


def wait_for_engine_results(references: Sequence[Any], what: str) -> list[Any]:
    """Return the results of one call to each engine, within the sync deadline.

    ``what`` completes "waited 300 s for ..." in the error. `SyncError` names the engines without a result.
    """
    return _get(references, env_vars.sync_timeout(), env_vars.SYNC_TIMEOUT, what)


def raise_engine_error(references: Sequence[Any]) -> None:
    """Raise the error of a call to an engine that has ended with one: `SyncError`, `PeerError` if it is lost.

    It does not wait: calls that have not ended, and results, are ignored.
    """
    for reference in ray.wait(list(references), num_returns=len(references), timeout=0)[0]:
        try:
            with actor_registry.translate_actor_errors("a call to an engine"):
                ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            reason = str(getattr(error, "cause", error)).strip().partition("\n")[0]
            raise SyncError(f"{actor_registry.describe_callee(reference)}: {reason}") from error
        except ray.exceptions.RayActorError as error:  # whose constructor has failed
            raise actor_registry.PeerError(actor_registry.describe_lost_actor(error)) from error


def wait_for_engine_start(engines: Sequence[Any]) -> None:
    """Wait until every engine actor has started, so that the rendezvous cannot wait for one that has died."""
    references = [answer_once.started(engine) for engine in engines]
    _get(references, env_vars.engine_timeout(), env_vars.ENGINE_TIMEOUT, "the engines to start")


def wait_for_sync(references: Sequence[Any], engines: Sequence[Any] | None) -> list[Any]:
    """Return the results of the trainer ranks' sync calls, in the process that drives them.

    A stopped trainer rank reports no error, but its engines reach their deadlines. So an engine's error, or
    the error with which an engine died, is raised here as well. The error of a trainer rank that died
    includes what an engine reports: the bucket in which the sync stopped.
    """
    pending = list(references)
    queries = {engine.sync_error.remote(): engine for engine in engines or []}
    while pending:
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_SECONDS)
        _raise_error(done, lambda: _wait_for_engine_error(queries))
        error = _engine_error(queries) if pending else ""
        if error:
            _raise_trainer_or_engine_error(pending, error)
    results: list[Any] = ray.get(list(references))
    return results


def _raise_error(done: Sequence[Any], engine_error: Callable[[], str]) -> None:
    """Raise the error of a trainer rank in ``done``; for a dead rank it includes ``engine_error()``."""
    try:
        ray.get(done)
    except ray.exceptions.RayTaskError:
        raise
    except ray.exceptions.RayActorError as dead:
        reasons = filter(None, (actor_registry.describe_lost_actor(dead), engine_error()))
        raise actor_registry.PeerError("; ".join(reasons)) from dead


def _engine_error(queries: dict[Any, Any]) -> str:
    """Return the sync error that an engine has reported ("" if none), and query the other engines again.

    ``queries`` are the engines by the reference of their pending query; it is updated.
    """
    answered, _ = ray.wait(list(queries), num_returns=len(queries), timeout=0) if queries else ([], [])
    for reference in answered:
        engine = queries.pop(reference)
        try:
            error = ray.get(reference)
        except ray.exceptions.RayActorError as lost:
            # Only a connection may have broken: the engine is queried again as long as Ray has it alive.
            broken = isinstance(lost, getattr(ray.exceptions, "ActorUnavailableError", ()))
            is_alive = broken and ray_private.handle_state(engine) == "ALIVE"
            error = "" if is_alive else actor_registry.describe_lost_actor(lost)
        if error:
            return str(error)
        queries[engine.sync_error.remote()] = engine
    return ""


def _wait_for_engine_error(queries: dict[Any, Any]) -> str:
    """Return an engine's error of a sync whose trainer has died, "" if no engine reports one in time."""
    end = time.monotonic() + 3 * env_vars.sync_grace()
    while not (error := _engine_error(queries)) and queries and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
    return error


def _raise_trainer_or_engine_error(pending: Sequence[Any], engine_error: str) -> None:
    """Raise a trainer rank's own error, which is more specific, if one arrives in time, else the engine's."""
    done, _ = ray.wait(list(pending), num_returns=1, timeout=2 * env_vars.sync_grace())
    _raise_error(done, lambda: engine_error)
    raise SyncError(engine_error)


def _get(references: Sequence[Any], seconds: float, variable: str, what: str) -> list[Any]:
    try:
        with actor_registry.translate_actor_errors(f"waiting for {what}"):
            results: list[Any] = ray.get(list(references), timeout=seconds)
    except ray.exceptions.GetTimeoutError as error:
        done, _ = ray.wait(list(references), num_returns=len(references), timeout=0)
        late = [index for index, reference in enumerate(references) if reference not in done]
        names = "; ".join(actor_registry.describe_callee(references[index]) for index in late)
        raise SyncError(
            f"waited {seconds:g} s for {what}; engines {late} of {len(references)} did not answer "
            f"(deadline: {variable}): {names}"
        ) from error
    return results
