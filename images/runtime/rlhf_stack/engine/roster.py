"""The engines that this process can use, and those that were lost.

Upstream's trainer and its sample generator share one list of engines, which is changed in place: a lost
engine is taken out, and put back when it has the trainer's weights.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from rlhf_stack.cluster import actor_registry, gcs_kv
from rlhf_stack.compat import ray_private
from rlhf_stack.config import env_vars
from rlhf_stack.engine import recipes, restarted
from rlhf_stack.lazy import ray
from rlhf_stack.sync import SyncError, wait_for_engine_results
from rlhf_stack.telemetry import events, run_log

POLL_SECONDS = 2.0
PAUSE_SECONDS = 0.5
NOTICE_SECONDS = 120.0  # within which Ray finds a node dead that was paused or cut off
ALIVE, DEAD = "ALIVE", "DEAD"

Call = Callable[[Any], Any]  # calls a method of an engine and returns the reference to its result


class Roster:
    """The engines in ``engines``, upstream's list in this process; an index is an engine's first position."""

    def __init__(self, engines: list[Any]) -> None:
        is_grouped = True
        if env_vars.engine_restarts():  # one may have been replaced while it started
            engines[:] = [recipes.current(*entry) for entry in enumerate(engines)]
            is_grouped = not is_group_deferred()
        self.engines = engines
        self.handles = dict(enumerate(engines))
        self.lost: dict[int, float] = {}  # since when, on the monotonic clock
        self.grouped = list(engines) if is_grouped else []  # the members of the weight-sync group

    @property
    def usable(self) -> dict[int, Any]:
        """The engines in the list, by their indices."""
        return {index: handle for index, handle in self.handles.items() if index not in self.lost}

    def index_of(self, handle: Any) -> int:
        """Return the index of an engine."""
        return next(index for index, other in self.handles.items() if other is handle)

    def drop(self, handle: Any, why: str) -> None:
        """Take an engine out of the list."""
        index = self.index_of(handle)
        self.lost[index] = time.monotonic()
        self._update()
        if _note_loss(index, handle):
            restarted.note_loss(index)
            events.emit("engine lost", engine=index, reason=why)
        run_log.warning(f"engine {index} is not used: {why}")

    def put_back(self, index: int, handle: Any) -> None:
        """Put an engine, whose actor is now ``handle``, into the list."""
        _note_loss(index, handle)  # it may lack the weights until a sync succeeds, which is no other loss
        self.handles[index] = handle
        del self.lost[index]
        self._update()

    def ask(self, call: Call, what: str, started: Sequence[Any] = ()) -> list[Any]:
        """Return the result of ``call`` for each engine; one that is lost is dropped and has no result.

        ``started`` are the references, if the calls were made already. A call that did not reach a living
        engine is repeated, so it must be idempotent. An engine that does not answer in time is restarted;
        without restarts it is a `SyncError`.
        """
        references = list(started) or [call(engine) for engine in self.engines]
        end = _deadline()
        results = []
        for engine, reference in zip(list(self.engines), references, strict=True):
            try:
                answered, result = _wait(engine, reference, call, what, end)
            except ray.exceptions.RayActorError:
                if not has_moved(self.index_of(engine), engine):
                    raise
                answered, result = False, None
            if answered:
                results.append(result)
            else:
                self.drop(engine, f"{what}: its process or node was lost")
        return results

    def loads(self) -> list[float]:
        """Drop the engines without the trainer's weights; return the unfinished work of the others."""
        works = self.ask(lambda engine: engine.unfinished_work.remote(), "unfinished_work")
        for engine, work in zip(list(self.engines), works, strict=True):
            if work is None:
                self.drop(engine, "it was restarted and lacks the trainer's weights")
        return [work for work in works if work is not None]

    def put_back_those_with_weights(self) -> None:
        """Put back the engines to which another process has sent the weights."""
        for index in list(self.lost):
            handle = recipes.current(index, self.handles[index])
            if ray_private.handle_state(handle) == ALIVE:
                answered, needs = answer(
                    handle, lambda engine: engine.needs_weights.remote(), "needs_weights"
                )
                if answered and not needs:
                    self.put_back(index, handle)

    def _update(self) -> None:
        self.engines[:] = self.usable.values()


def _note_loss(index: int, handle: Any) -> bool:
    """Note that the process before the one of ``handle`` was lost; return False if that is noted already."""
    is_noted = False
    with gcs_kv.best_effort(f"store the loss of engine {index}"):
        is_noted = not gcs_kv.add_record(f"losses/{ray_private.incarnation(handle)}", {"engine": index})
    return not is_noted


def defer_group() -> None:
    """Record that the run has no weight-sync group yet: no roster that is made from now on has members."""
    gcs_kv.put_record(_deferred(), {"deferred": True})


def is_group_deferred() -> bool:
    """Report whether the run begins without a weight-sync group."""
    return bool(gcs_kv.list_records(_deferred()))


def _deferred() -> str:
    return f"deferred-group/{ray.get_runtime_context().get_job_id()}"


_rosters: dict[int, Roster] = {}  # by the identity of the list, to which the roster refers


def of(engines: Any) -> Roster:
    """Return the roster of a list of engines, which is complete when it is first given."""
    if id(engines) not in _rosters:
        _rosters[id(engines)] = Roster(engines)
    return _rosters[id(engines)]


def engine_results(
    engines: Any, references: Sequence[Any], method: str, arguments: Sequence[Any], options: dict[str, Any]
) -> list[Any]:
    """Return the results of upstream's calls of ``method``, ``references``, without those of lost engines."""
    if not env_vars.engine_restarts():
        return wait_for_engine_results(references, method)

    def call(engine: Any) -> Any:
        return getattr(engine, method).remote(*arguments, **options)

    called = list(engines)
    team = of(engines)
    if team.engines != called:  # the roster was made now: an engine was replaced before this process knew it
        references = [
            reference if engine == before else call(engine)
            for engine, before, reference in zip(team.engines, called, references, strict=True)
        ]
    return team.ask(call, method, references)


def has_moved(index: int, handle: Any) -> bool:
    """Report whether another process has replaced ``handle``, the actor of engine ``index``."""
    return bool(env_vars.engine_restarts() and recipes.current(index, handle) != handle)


def answer(engine: Any, call: Call, what: str) -> tuple[bool, Any]:
    """Return whether ``engine`` has answered ``call``, and its answer; it has not if it is being restarted.

    Ray repeats many calls on the restarted engine, which may wait until this process permits its start.
    """
    return _wait(engine, call(engine), call, what, _deadline())


def _deadline() -> float:
    return time.monotonic() + max(NOTICE_SECONDS, env_vars.sync_timeout())


def _wait(engine: Any, reference: Any, call: Call, what: str, end: float) -> tuple[bool, Any]:
    """Return whether ``engine`` has answered, and its answer; it has not if it is being restarted.

    One that does not answer until ``end``, such as a stopped process, is ended, and Ray restarts it. Raises
    Ray's error for an engine that stays dead, and `SyncError` for a late one if there are no restarts.
    """
    while True:
        try:
            return True, ray.get(reference, timeout=POLL_SECONDS)
        except ray.exceptions.GetTimeoutError:
            again = False
        except ray.exceptions.ActorUnavailableError:
            again = True
        if ray_private.handle_state(engine) not in (ALIVE, DEAD):
            return False, None
        if time.monotonic() > end:
            late = f"{what}: no answer from {actor_registry.describe_callee(reference)}"
            if not env_vars.engine_restarts():
                raise SyncError(late)
            run_log.warning(f"{late}: its process is ended")
            ray.kill(engine, no_restart=False)
            return False, None
        if again:
            time.sleep(PAUSE_SECONDS)
            reference = call(engine)
