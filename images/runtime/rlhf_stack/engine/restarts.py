"""Recovery of lost engines: on their own GPUs or others, else without them; then a new group and weights.

Ray restarts the actor of an engine on its bundle, and its handle stays valid. An engine whose node is gone is
created on other nodes with free GPUs. Without such nodes the run continues with the other engines, and the
engine comes back when a place is free. This happens before a weight sync, and again if the sync fails.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from rlhf_stack.cluster import actor_registry, answer_once, run_metrics
from rlhf_stack.cluster.actor_registry import PeerError
from rlhf_stack.compat import ray_private
from rlhf_stack.config import env_vars
from rlhf_stack.engine import recipes, restarted, roster, startup
from rlhf_stack.engine.roster import ALIVE, DEAD, Roster
from rlhf_stack.lazy import ray
from rlhf_stack.sync import (
    SyncError,
    SyncMismatch,
    actor_trainer,
    wait_for_engine_results,
    wait_for_engine_start,
    wait_for_sync,
)
from rlhf_stack.sync.trainer import uses_ray_collectives
from rlhf_stack.telemetry import events, run_log

TOTAL = 3  # times the restarts of one engine is the limit for all engines of a run together
POLL_SECONDS = 2.0
VERSION, MIXED = "weights/version", "weights/mixed_answers"  # among the values that upstream logs of a step

_senders: list[Callable[[], None]] = []  # at most one


def use_to_send_weights(send: Callable[[], None]) -> None:
    """Make ``send`` the action of `send_weights_now` in this process, which must not train meanwhile."""
    _senders[:] = [send]


def send_weights_now(engines: Any) -> None:
    """Wait for the restarted ``engines`` and send them the weights, when no other engine is left to generate.

    Engines that sleep are then wholly awake: a sync wakes up their weights alone. `PeerError` where that is
    impossible: in asynchronous training the trainer trains meanwhile.
    """
    if not _senders:
        raise PeerError("no engine with the trainer's weights is left, and the trainer cannot send them now")
    run_log.warning("no engine with the trainer's weights is left: waiting for a restarted one")
    _senders[0]()
    team = roster.of(engines)
    if any(recipes.sleeps(index) for index in team.usable):
        team.ask(lambda engine: engine.wake_up.remote(), "wake_up")


def wait_for_start(engines: Any, others: Sequence[Any] = ()) -> None:
    """See `startup.wait_for_engine_startup`; an engine that is lost meanwhile starts again, if it may.

    Ray restarts its process. If its node is gone, an actor on other free GPUs replaces it in ``engines``.
    Without such GPUs the run begins without it, and the weight-sync group is formed before the first sync.
    """
    if not env_vars.engine_restarts():
        startup.wait_for_engine_startup(engines, others)
        return
    engines = [] if engines is None else engines
    seen: dict[int, int] = {}
    absent: set[int] = set()
    while True:
        absent.clear()
        startup.wait_for_engine_startup(
            engines, others, lambda missing: _start_again(engines, missing, seen, absent)
        )
        with actor_registry.translate_actor_errors("waiting for the engines"):
            if all(_is_ready(*entry) for entry in enumerate(engines) if entry[0] not in absent):
                return
        others = ()


def _is_ready(index: int, engine: Any) -> bool:
    """Let a restarted engine take part in the beginning of the run; False if it was lost meanwhile.

    None has other weights than those with which the run begins.
    """
    answered, lacks = roster.answer(engine, lambda engine: engine.needs_weights.remote(), "needs_weights")
    if not (answered and lacks):
        return answered
    received = "weights_received"
    return (
        _is_as_the_others(index, engine)
        and roster.answer(engine, lambda engine: engine.weights_received.remote(at_start=True), received)[0]
    )


def engine_results(
    engines: Any, references: Sequence[Any], method: str, arguments: Sequence[Any], options: dict[str, Any]
) -> list[Any]:
    """See `roster.engine_results`; the process that creates the engines waits until lost ones have started.

    It hands its list to the other processes of the run, for which an engine's position is its index.
    """
    results = roster.engine_results(engines, references, method, arguments, options)
    if recipes.created_here():
        team = roster.of(engines)
        if lost := list(team.lost):
            for index in lost:
                team.put_back(index, team.handles[index])
            wait_for_start(engines)
    return results


def _start_again(
    engines: Sequence[Any], missing: Sequence[int], seen: dict[int, int], absent: set[int]
) -> dict[int, Any]:
    """Let restarted ones of the ``missing`` start, and replace engines whose node is gone; return both.

    These can be engines that were up: the trainer may wait for one, or has a group with it. One without
    another place is None, and added to ``absent``. ``seen`` are the restarts that the last call has seen; it
    is updated. `PeerError` if too few engines are left, or if all restarts are used.
    """
    _check_total()
    counts = _restarts()
    found = {index: engines[index] for index in missing if counts.get(index, 0) > seen.get(index, 0)}
    seen.update(counts)
    for index in missing:
        restarted.permit(index)
    for index in range(len(engines)):
        if index not in absent and recipes.lost_nodes(index):
            restarted.note_loss(index)
            found[index] = recipes.replace(index, engines[index], wait=False)
            if found[index] is None or index not in missing:
                roster.defer_group()  # before a wait for new nodes, in which the trainer would wait for it
            if found[index] is None and env_vars.flag(env_vars.AUTOSCALE):
                found[index] = recipes.replace(index, engines[index])
            if found[index] is None:
                absent.add(index)
                _require_engines(index, len(engines) - len(absent))
    return found


def forms_weight_group(method: Callable[[Any, str], None]) -> Callable[[Any, str], None]:
    """See `actor_trainer.forms_weight_group`; engines that were replaced while they started are used.

    If an engine is lost meanwhile, the process that creates the engines waits for its restart or begins
    without it, and the group is formed before the first sync.
    """
    formed = actor_trainer.forms_weight_group(method)

    @wraps(method)
    def formed_if_none_is_lost(trainer: Any, backend: str) -> None:
        if not env_vars.engine_restarts():
            formed(trainer, backend)
            return
        trainer.vllm_engines = [_started(*entry) for entry in enumerate(trainer.vllm_engines)]
        if _lost(trainer.vllm_engines):
            roster.defer_group()
        if roster.is_group_deferred():
            _begin_without_group(trainer, "an engine is lost")
            return
        since = _restarts()
        try:
            formed(trainer, backend)
        except (SyncError, PeerError) as error:
            if not _drop_lost(roster.of(trainer.vllm_engines), since):
                raise
            roster.defer_group()
            _begin_without_group(trainer, _last_line(error))

    return formed_if_none_is_lost


def _begin_without_group(trainer: Any, why: str) -> None:
    """Log that the group is formed later; `PeerError` with Ray's collectives, whose group is formed once."""
    if uses_ray_collectives(trainer.strategy.args):
        raise PeerError(
            f"--vllm.sync_with_ray cannot leave out an engine, and one was lost at the start ({why}): submit "
            "the run again, or without --vllm.sync_with_ray"
        )
    run_log.warning(f"the weight-sync group is formed before the first sync: {why}")


def _started(index: int, handle: Any) -> Any:
    """Wait until engine ``index`` has started; return its actor, ``handle`` unless that was replaced.

    It is not awaited any more once the group is deferred: if its node is lost, `_start_again` defers it or
    replaces the engine. `StartError` if it is not up in time.
    """
    while True:
        handle, name = recipes.current(index, handle), recipes.name(index)
        started, end = [answer_once.started(handle)], time.monotonic() + env_vars.engine_timeout()
        while not ray.wait(started, timeout=POLL_SECONDS)[0]:
            if roster.is_group_deferred():
                return handle
            if time.monotonic() > end:
                raise startup.late([index])
        try:
            wait_for_engine_start([handle])
            return handle
        except PeerError:
            if recipes.name(index) == name:
                raise


def wait_for_restarts(engines: Any, actor_group: Any) -> None:
    """Before a weight sync: bring lost engines back and form the sync group of the usable ones.

    ``actor_group`` is the ``RayActorGroup`` of the trained model. Raises `PeerError` if an engine has used
    its restarts or too few engines are left, `StartError` if one is not up in time.
    """
    if engines is None or not env_vars.engine_restarts():
        return
    team = roster.of(engines)
    with actor_registry.translate_actor_errors("before a weight sync"):
        team.loads()
    _recover(team, actor_group, is_group_broken=False)


def sync_weights(engines: Any, actor_group: Any, sleeps: bool) -> None:
    """Send the weights to the engines; with restarts, repeat a sync that failed without those that were lost.

    A sync is repeated at most once more than engines are lost in it: the cause may be gone, as when a link
    was cut for a while. ``sleeps``: the engines sleep between two syncs.
    """
    if engines is None or not env_vars.engine_restarts():
        wait_for_sync(actor_group.async_run_method("broadcast_to_vllm"), engines)
        received = [answer_once.idempotent(engine.weights_received) for engine in engines or []]
        _log_versions(wait_for_engine_results(received, "the engines"))
        return
    team = roster.of(engines)
    is_repeated = is_broken = False
    while True:
        while is_broken or team.engines != team.grouped:  # one can be lost while it wakes up
            _recover(team, actor_group, is_broken)
            is_broken = False
            if sleeps:
                team.ask(lambda engine: engine.wake_up.remote(tags=["weights"]), "wake_up")
        since = _restarts()
        references = actor_group.async_run_method("broadcast_to_vllm")
        try:
            wait_for_sync(references, engines)
            break
        except SyncMismatch:
            raise
        except (SyncError, PeerError) as error:
            if not _have_ended(references):
                raise
            lost = _drop_lost(team, since)
            if is_repeated and not lost:
                raise
            run_log.warning(f"the weight sync is repeated: {_last_line(error)}")
            events.emit("sync repeated", engines=lost, reason=_last_line(error))
        is_repeated = is_broken = True
    _log_versions(team.ask(lambda engine: engine.weights_received.remote(), "weights_received"))


def _log_versions(states: Sequence[tuple[int, int]]) -> None:
    """Log the version of the engines' weights, and the answers that mix two, with the training step."""
    if states:
        versions, mixed = zip(*states, strict=True)
        events.log_with_step({VERSION: min(versions), MIXED: sum(mixed)})


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1]


def _have_ended(references: Sequence[Any]) -> bool:
    """Wait for all ranks of a failed sync; False if one stays in it, and no other sync can begin."""
    seconds = env_vars.sync_timeout() + 6 * env_vars.sync_grace()
    return not ray.wait(list(references), num_returns=len(references), timeout=seconds)[1]


def _drop_lost(team: Roster, since: Mapping[int, int]) -> list[int]:
    """Drop the engines that were lost or lack the trainer's weights.

    Returns the indices of those that were lost since the restarts were ``since``: others lack the weights
    because a sync after their restart has failed.
    """
    before = set(team.lost)
    with actor_registry.translate_actor_errors("after a weight sync that failed"):
        team.ask(lambda engine: engine.needs_weights.remote(), "needs_weights")
        lost = set(team.lost) - before
        team.loads()
    again = {index for index, number in _restarts().items() if number > since.get(index, 0)}
    return sorted(lost | again - before)


def _restarts() -> dict[int, int]:
    """Return how often each engine of this run was restarted."""
    return restarted.counts(str(ray.get_runtime_context().get_job_id()))


def _recover(team: Roster, actor_group: Any, is_group_broken: bool) -> None:
    """Bring the lost engines back, and form the group again if it is broken or has other members now.

    An engine that is lost meanwhile is one more to bring back.
    """
    begun = time.monotonic()
    placeless = {index for index in team.lost if team.grouped and team.handles[index] not in team.grouped}
    lost: dict[int, float] = {}  # since when
    back: set[int] = set()
    while True:
        lost = {**team.lost, **lost}
        for index in sorted(team.lost):
            with actor_registry.translate_actor_errors(f"waiting for the restart of engine {index}"):
                if handle := _bring_back(team, index):
                    team.put_back(index, handle)
                    back.add(index)
        _require_others(team)
        if not (is_group_broken or back or team.engines != team.grouped):
            return
        if _form_group(team, actor_group):
            break
    seconds = time.monotonic() - begun
    _lost_seconds.append(seconds)
    detected = min([begun, *(since for index, since in lost.items() if index not in placeless - back)])
    back -= set(team.lost)
    events.emit(
        "recovered",
        lost=sorted(lost),
        back=sorted(back),
        engines=len(team.engines),
        seconds=seconds,
        detected=time.time() - (time.monotonic() - detected),
    )
    run_metrics.publish({("rlhf_stack_recovery_seconds", "run"): sum(_lost_seconds)})


def _form_group(team: Roster, actor_group: Any) -> bool:
    """Form the sync group of the usable engines; return False if one of them was lost meanwhile."""
    run_log.info(f"a new weight-sync group is formed with {len(team.engines)} engines")
    since, before = _restarts(), set(team.lost)
    # They leave the former group here and not in the trainer: `wait_for_sync` would read their errors of it.
    with actor_registry.translate_actor_errors("leaving the weight-sync group"):
        team.ask(lambda engine: engine.leave_weight_group.remote(), "leave_weight_group")
    if set(team.lost) != before:
        return False
    references = actor_group.async_run_method("form_weight_group", team.usable)
    try:
        wait_for_sync(references, team.engines)
    except (SyncError, PeerError) as error:
        if not (_have_ended(references) and _drop_lost(team, since)):
            raise
        run_log.warning(f"the weight-sync group is formed again: {_last_line(error)}")
        return False
    team.grouped = list(team.engines)
    return True


_lost_seconds: list[float] = []  # in which this run waited for lost engines


def _check_total() -> None:
    total = sum(_restarts().values())
    if total > (most := TOTAL * env_vars.engine_restarts()):
        raise PeerError(
            f"engines were restarted {total} times, and {most} are allowed for all together "
            f"({env_vars.ENGINE_RESTARTS} is {env_vars.engine_restarts()} for each)"
        )


def _bring_back(team: Roster, index: int) -> Any | None:
    """Wait until engine ``index`` is up again, on its own or other nodes; return its actor.

    None if its node is gone and there is no other place. Each of its restarts has the whole time, after its
    pause.
    """
    handle = team.handles[index]
    seen, end = -1, 0.0
    while True:
        if (number := restarted.count(index)) != seen:
            _check_total()
            seen, end = number, time.monotonic() + restarted.backoff(number) + env_vars.engine_timeout()
        restarted.permit(index)
        state = ray_private.handle_state(handle)
        if state == ALIVE and _is_up(handle) and _is_as_the_others(index, handle):
            return handle
        if state == DEAD:
            ray.get(handle.__ray_ready__.remote())  # raises Ray's reason
        if state != ALIVE and recipes.lost_nodes(index):
            if (replacement := recipes.replace(index, handle)) is None:
                return None
            handle = team.handles[index] = replacement
        elif time.monotonic() > end:
            raise startup.late([index])
        else:
            time.sleep(POLL_SECONDS)


def _is_up(handle: Any) -> bool:
    """Report whether an engine answers now."""
    try:
        ray.get(handle.__ray_ready__.remote(), timeout=POLL_SECONDS)
    except (ray.exceptions.GetTimeoutError, ray.exceptions.ActorUnavailableError):
        return False
    return True


def _is_as_the_others(index: int, handle: Any) -> bool:
    """Put a restarted engine to sleep if engines sleep between two syncs; False if it was lost meanwhile."""
    return (
        not recipes.sleeps(index) or roster.answer(handle, lambda engine: engine.sleep.remote(), "sleep")[0]
    )


def _require_others(team: Roster) -> None:
    """Raise `PeerError` unless enough engines are left without the lost ones, which have no place."""
    for index in team.lost:
        _require_engines(index, len(team.engines))


def _require_engines(lost: int, left: int) -> None:
    """Raise `PeerError` unless ``left`` engines are enough without engine ``lost``, which has no place."""
    nodes, least = ", ".join(recipes.lost_nodes(lost)), env_vars.min_engines()
    why = f"engine {lost} cannot be restarted: its node {nodes} is gone, and no other has room"
    if left < least:
        raise PeerError(f"{why}; {left} engines are left, and {env_vars.MIN_ENGINES} is {least}")
    run_log.warning(f"{why}; the run continues with {left} engines")


def record_models_ready(engines: Sequence[Any] | None) -> None:
    """See `events.models_up`; an engine that is lost now, or while it is asked, has no location."""
    events.models_up(engines, _location if env_vars.engine_restarts() else None)


def _location(engine: Any) -> Any | None:
    if _lost([engine]):
        return None
    return roster.answer(engine, lambda engine: engine.where.remote(), "where")[1]


def _lost(engines: Sequence[Any]) -> list[int]:
    """Return the indices of the started ``engines`` that are lost now."""
    return [index for index, engine in enumerate(engines) if ray_private.handle_state(engine) != ALIVE]
