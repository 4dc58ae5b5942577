"""Calls of actors that survive a broken connection: Ray repeats them, and the actor executes each once.

By default a call ends with ``ActorUnavailableError`` when its connection breaks, although the actor may
execute it. With ``max_task_retries`` Ray calls again, and the actor would execute it twice: a step would be
trained twice. Here a repeated call returns the result of the first one.
"""

import asyncio
import functools
import traceback
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from types import FunctionType
from typing import Any

from rlhf_stack.compat import ray_private
from rlhf_stack.lazy import ray

KEPT = 8  # results of this actor: more than the calls that it gets before Ray repeats an earlier one
REPEATED = "_rlhf_stack_repeated"  # an attribute of a decorated method
WHILE_IT_LIVES = -1  # Ray repeats a call until it knows that the actor is dead

_outcomes: OrderedDict[str, tuple[Any, BaseException | None]] = OrderedDict()  # by Ray's id of a call
_executing: list[str] = []
_started: OrderedDict[str, asyncio.Future[Any]] = OrderedDict()  # the same of an asynchronous actor


class AnswersOnce:
    """A base of actor classes that execute one call at a time: their public methods answer each call once."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, method in list(vars(cls).items()):
            if isinstance(method, FunctionType) and not name.startswith("_"):
                setattr(cls, name, once(method))


def repeats_calls(actor_class: Any) -> Any:
    """Return the Ray actor class, whose calls Ray repeats; one without `AnswersOnce` is unchanged."""
    if issubclass(ray_private.python_class(actor_class), AnswersOnce):
        ray_private.set_task_retries(actor_class, WHILE_IT_LIVES)
    return actor_class


def once(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method of an actor: a call that Ray repeats has the outcome of its first execution."""

    @functools.wraps(method)
    def answered(*arguments: Any, **options: Any) -> Any:
        from rlhf_stack.cluster.answer_once import execute  # Ray pickles this function by value

        return execute(method, arguments, options)

    return answered


def execute(method: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return the result of ``method``, or raise its error, as if this call had been executed once."""
    call = ray.get_runtime_context().get_task_id() if ray.is_initialized() else None
    if call is None or call in _executing:  # no call of an actor, or a method calls another one
        return method(*arguments, **options)
    if call not in _outcomes:
        _executing.append(call)
        try:
            _keep(call, (method(*arguments, **options), None))
        except Exception as error:
            for one in (error, error.__cause__, error.__context__):
                traceback.clear_frames(one.__traceback__ if one else None)  # they hold tensors
            _keep(call, (None, error))
            raise
        finally:
            _executing.remove(call)
    result, failure = _outcomes[call]
    if failure is not None:
        raise failure
    return result


def started(actor: Any) -> Any:
    """Return a reference that is ready when an actor has started; of a dead one it has Ray's error."""
    return idempotent(actor.__ray_ready__)


def idempotent(method: Any) -> Any:
    """Call a method that an actor may execute twice, also after a restart; return the reference.

    Ray repeats the call if its connection breaks, from the first release that reports that.
    """
    if hasattr(ray.exceptions, "ActorUnavailableError"):
        method = method.options(max_task_retries=WHILE_IT_LIVES)
    return method.remote()


def repeated(method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
    """Decorate an asynchronous method of an actor: Ray repeats its calls, and each is executed once.

    A method that is decorated already is returned: Ray makes a subclass of an actor's class.
    """
    if hasattr(method, REPEATED):
        return method
    method = ray.method(max_task_retries=WHILE_IT_LIVES)(method)

    @functools.wraps(method)
    async def answered(*arguments: Any, **options: Any) -> Any:
        from rlhf_stack.cluster.answer_once import execute_async  # Ray pickles this function by value

        return await execute_async(method, arguments, options)

    setattr(answered, REPEATED, True)
    return answered


async def execute_async(
    method: Callable[..., Coroutine[Any, Any, Any]], arguments: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """Return the result of ``method`` as if this call had been executed once; a repeated one waits for it."""
    call = ray.get_runtime_context().get_task_id() if ray.is_initialized() else None
    if call is None:
        return await method(*arguments, **options)
    if call not in _started:
        _started[call] = asyncio.ensure_future(method(*arguments, **options))
        while len(_started) > KEPT:
            _started.popitem(last=False)
    return await _started[call]


def _keep(call: str, outcome: tuple[Any, BaseException | None]) -> None:
    _outcomes[call] = outcome
    while len(_outcomes) > KEPT:
        _outcomes.popitem(last=False)
