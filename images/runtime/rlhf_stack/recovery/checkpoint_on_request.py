"""Saves a checkpoint of OpenRLHF 0.11's trainer when `preemption` asks for one, also while engines generate.

Between two steps the models are those of the last step's end, and so is what a checkpoint records beside
them. A thread therefore saves during generation, which is most of a step; during training it waits for the
end of the step. The trainer does not begin another step before the request's time is over.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from rlhf_stack.compat.determinism import rollout
from rlhf_stack.lazy import ray
from rlhf_stack.recovery import preemption
from rlhf_stack.recovery.preemption import Answer, Request
from rlhf_stack.telemetry import events, run_log

POLL_SECONDS = 1.0

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@dataclass
class Progress:
    """The last step that ended, the last one that is ``saved``, and whether the models are those of the end.

    Once the training ``has_ended``, the driver saves the models, and nobody else may use them. ``longest`` is
    the duration in seconds of the longest end of a step, which includes its checkpoint. ``failure`` is the
    error of a save, after which other ranks may still be in it: the run ends before it calls them again.
    ``changed`` is notified, and held by whoever uses the models.
    """

    step: int = 0
    saved: int = 0
    client_states: dict[str, Any] = field(default_factory=dict)
    is_consistent: bool = False
    has_ended: bool = False
    longest: float = 0.0
    failure: Exception | None = None
    changed: threading.Condition = field(default_factory=lambda: threading.Condition(threading.RLock()))


_progress = Progress()
_watched: set[str] = set()  # the job of this process


def trains(fit: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate ``fit`` of a trainer's actor: no checkpoint is saved after it.

    Ray pickles the actor's own methods with the globals that they use, so this one uses functions only.
    """

    @functools.wraps(fit)
    def trained(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        try:
            result = fit(*arguments, **options)
        finally:
            _end_training()
        _raise_failure()
        return result

    return trained


def _end_training() -> None:
    with _progress.changed:
        _progress.has_ended = True
        _progress.changed.notify_all()


def _raise_failure() -> None:
    if _progress.failure:
        raise _progress.failure


def begins_step(method: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate ``BasePPOTrainer.train_step``: no checkpoint is saved before the step's end is recorded."""

    @functools.wraps(method)
    def begun(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        with _progress.changed:
            _raise_failure()
            _progress.is_consistent = False
        return method(*arguments, **options)

    return begun


def uses_models(method: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate a method that calls the models' ranks: all get its calls and a save's in the same order."""

    @functools.wraps(method)
    def used(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        with _progress.changed:
            _raise_failure()
            return method(*arguments, **options)

    return used


def ends_step(method: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``BasePPOTrainer.save_logs_and_checkpoints``: the step has ended when it returns."""

    @functools.wraps(method)
    def ended(
        trainer: Any,
        global_step: int,
        logs_dict: dict[str, Any] | None = None,
        client_states: dict[str, Any] | None = None,
    ) -> None:
        with _progress.changed:
            begun = time.monotonic()
            method(trainer, global_step, logs_dict, client_states)
            _progress.longest = max(_progress.longest, time.monotonic() - begun)
            _progress.step, _progress.client_states = global_step, dict(client_states or {})
            if global_step % trainer.args.ckpt.save_steps == 0:
                _progress.saved = global_step
            _progress.is_consistent = True
            rollout.ended(global_step)
            _progress.changed.notify_all()
        _watch(trainer)

    return ended


def save(trainer: Any, asked: Request, job: str, begun: float | None = None) -> Answer:
    """Save the last step's end within the time of ``asked``; raises what OpenRLHF's save raises.

    Its time began at ``begun`` on the monotonic clock, by default now. Holds the models until it is over or
    the request is withdrawn, so that no step begins in between. An error of the save also ends the run.
    """
    end = (time.monotonic() if begun is None else begun) + asked.seconds
    if trainer.args.ckpt.disable_ds:
        return Answer(job, done=True, problem="--ckpt.disable_ds turns checkpoints off")
    late = Answer(job, done=True, problem="the step does not end in time")
    if not _progress.changed.acquire(timeout=max(0.0, end - time.monotonic())):
        return late
    try:
        while not _progress.is_consistent and not _progress.has_ended:
            left = end - _progress.longest - time.monotonic()
            if left <= 0 or not _progress.changed.wait(left):
                return late
        if _progress.has_ended:
            return Answer(job, done=True, step=_progress.step, problem="the training has ended")
        _raise_failure()
        if (left := end - time.monotonic()) < _progress.longest:
            problem = f"{left:.0f} s are left, and the longest checkpoint took {_progress.longest:.0f} s"
            return Answer(job, done=True, step=_progress.step, problem=problem)
        begun = time.monotonic()
        if _progress.saved != _progress.step:
            try:
                _save(trainer)
            except Exception as error:
                _progress.failure = error
                raise
            _progress.saved = _progress.step
        seconds = time.monotonic() - begun
        _progress.longest = max(_progress.longest, seconds)
        reply = Answer(job, done=True, saved=True, step=_progress.step, seconds=seconds)
        _report(asked, reply)
        while time.monotonic() < end and asked in preemption.open_requests(job):
            time.sleep(POLL_SECONDS)
        return reply
    finally:
        _progress.changed.release()


def _watch(trainer: Any) -> None:
    """Start the thread that waits for requests, once, if this process is connected to Ray."""
    if _watched:
        return
    if not ray.is_initialized():
        return
    job = str(ray.get_runtime_context().get_job_id())
    _watched.add(job)
    earlier = {asked.id for asked in preemption.open_requests(job)}  # their time may be over
    threading.Thread(target=_serve, args=(trainer, job, earlier), name="preemption", daemon=True).start()


def _serve(trainer: Any, job: str, handled: set[str]) -> None:
    """Confirm each request at once; another thread saves for one after the other."""
    waiting: SimpleQueue[tuple[Request, float]] = SimpleQueue()
    threading.Thread(
        target=_save_in_turn, args=(trainer, job, waiting), name="checkpoint", daemon=True
    ).start()
    while ray.is_initialized():
        time.sleep(POLL_SECONDS)
        with contextlib.suppress(*_lost()):
            for asked in preemption.open_requests(job):
                if asked.id not in handled:
                    handled.add(asked.id)
                    preemption.answer(asked, Answer(job))
                    waiting.put((asked, time.monotonic()))


def _save_in_turn(trainer: Any, job: str, waiting: "SimpleQueue[tuple[Request, float]]") -> None:
    while True:
        asked, begun = waiting.get()
        with contextlib.suppress(*_lost()):
            _handle(trainer, asked, job, begun)


def _lost() -> tuple[type[Exception], ...]:
    """The errors of a GCS that is lost, after which the run ends by itself."""
    return ray.exceptions.RayError, OSError, RuntimeError, LookupError


def _handle(trainer: Any, asked: Request, job: str, begun: float) -> None:
    from ray.exceptions import RayError

    run_log.warning(f"a checkpoint is requested, within {asked.seconds:.0f} s")
    try:
        reply = save(trainer, asked, job, begun)
    except (RayError, OSError, RuntimeError) as error:
        reply = Answer(job, done=True, problem=(str(error).strip().splitlines() or [repr(error)])[-1])
    if not reply.saved:
        _report(asked, reply)


def _report(asked: Request, reply: Answer) -> None:
    preemption.answer(asked, reply)
    events.emit(
        "preemption", step=reply.step, saved=reply.saved, seconds=reply.seconds, problem=reply.problem
    )
    for line in preemption.describe([reply]):
        run_log.warning(line)


def _save(trainer: Any) -> None:
    """Call the ranks as `save_logs_and_checkpoints` does for a step that is to be saved."""
    value = trainer._latest_eval_metric_value
    key = _progress.client_states.get("checkpoint_metric_key") or trainer.best_eval_metric_key or None
    states = _progress.client_states | {
        "best_eval_metric_key": trainer.best_eval_metric_key,
        "best_eval_metric_value": trainer.best_eval_metric_value,
        "latest_eval_metric_value": value,
    }
    common = {"tag": f"global_step{_progress.step}", "metric_value": value, "metric_key": key}
    saves = trainer.actor_model_group.async_run_method("save_checkpoint", client_states=states, **common)
    if trainer.critic_model_group is not None:
        saves += trainer.critic_model_group.async_run_method("save_checkpoint", **common)
    ray.get(saves)
