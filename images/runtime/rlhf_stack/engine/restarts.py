"""Waits of a run for its restarted engines, and the limit of their restarts.

Ray restarts an engine's actor on its bundle, and its handle stays valid. Before the next weight sync the run
waits for it, forms the sync group again, and sends the full weights.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from rlhf_stack.cluster import actor_registry
from rlhf_stack.cluster.actor_registry import PeerError
from rlhf_stack.config import env_vars
from rlhf_stack.engine import restarted, startup
from rlhf_stack.sync import wait_for_engine_results, wait_for_sync
from rlhf_stack.telemetry import run_log

TOTAL = 3  # times the restarts of one engine is the limit for all engines of a run together
POLL_SECONDS = 2.0

_senders: list[Callable[[], None]] = []  # at most one


def most_restarts(shares_gpus: bool, sleeps: bool) -> int:
    """Return how often Ray restarts an engine: never if it ``sleeps`` or ``shares_gpus`` with the trainer.

    The trainer has taken their memory when the engine is lost, and a restarted engine is awake.
    """
    return 0 if shares_gpus or sleeps else env_vars.engine_restarts()


def use_to_send_weights(send: Callable[[], None]) -> None:
    """Make ``send`` the action of `send_weights_now` in this process, which must not train meanwhile."""
    _senders[:] = [send]


def send_weights_now() -> None:
    """Wait for the restarted engines and send them the weights, when no other engine is left.

    `PeerError` where that is impossible: in asynchronous training the trainer trains meanwhile.
    """
    if not _senders:
        raise PeerError("no engine with the trainer's weights is left, and the trainer cannot send them now")
    run_log.warning("no engine with the trainer's weights is left: waiting for a restarted one")
    _senders[0]()


def wait_for_restarts(engines: Sequence[Any] | None, actor_group: Any) -> None:
    """Before a weight sync: wait for engines that were lost, then form the sync group again with them.

    ``actor_group`` is the ``RayActorGroup`` of the trained model. Raises `PeerError` if an engine cannot be
    restarted (it has used its restarts, or its node is gone), `StartError` if it is not up in time.
    """
    if not engines or not env_vars.engine_restarts():
        return
    lost = _without_weights(engines)
    if not lost:
        return
    _check_total()
    for index in lost:
        with actor_registry.translate_actor_errors(f"waiting for the restart of engine {index}"):
            _wait_until_up(index, engines[index])
    run_log.info(f"restarted engines {lost} join a new weight-sync group")
    wait_for_sync(actor_group.async_run_method("form_weight_group"), engines)


def _without_weights(engines: Sequence[Any]) -> list[int]:
    """Return the engines that were lost or lack the weights; `PeerError` for one that stays dead."""
    queries = [engine.needs_weights.remote() for engine in engines]
    lost = []
    for index, query in enumerate(queries):
        try:
            (needs,) = wait_for_engine_results([query], f"engine {index} to report whether it has weights")
        except PeerError as error:
            if not is_restarting(error.__cause__):
                raise
            needs = True
        if needs:
            lost.append(index)
    return lost


def is_restarting(error: BaseException | None) -> bool:
    """Report whether Ray's ``error`` for a lost actor means that the actor is, or will be, restarted."""
    import ray

    return isinstance(error, ray.exceptions.ActorUnavailableError)


def _check_total() -> None:
    import ray

    total = restarted.total(str(ray.get_runtime_context().get_job_id()))
    if total > (most := TOTAL * env_vars.engine_restarts()):
        raise PeerError(
            f"engines were restarted {total} times, and {most} are allowed for all together "
            f"({env_vars.ENGINE_RESTARTS} is {env_vars.engine_restarts()} for each)"
        )


def _wait_until_up(index: int, engine: Any) -> None:
    import ray

    end = time.monotonic() + env_vars.engine_timeout()
    while True:
        ready = engine.__ray_ready__.remote()
        try:
            ray.get(ready, timeout=POLL_SECONDS)
            return
        except ray.exceptions.GetTimeoutError:
            pass
        except ray.exceptions.ActorUnavailableError:
            time.sleep(POLL_SECONDS)
        if node := actor_registry.lost_node(ready):
            raise PeerError(f"engine {index} cannot be restarted: its node {node} is gone")
        if time.monotonic() > end:
            raise startup.late([index])
