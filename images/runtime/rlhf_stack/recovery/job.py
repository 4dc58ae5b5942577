"""A job of Ray's job server: submitted, followed until it ends, and stopped."""

import asyncio
import contextlib
import queue
import secrets
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlhf_stack.cluster.connect import summarize_ray_error
from rlhf_stack.cluster.direct import exclude_from_proxy
from rlhf_stack.errors import UserError
from rlhf_stack.telemetry.run_log import messages

LOST = 122  # exit code: the connection to the running job was lost
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
STOP_SECONDS = 60.0
SILENT_SECONDS = 60.0  # without output, after which the job server is asked for the job's state
SUBMIT_SECONDS = 600.0  # for a submission, which uploads the working directory
ANSWER_SECONDS = 15.0  # of the job server: Ray's client itself has no time limit
LOST_SECONDS = 30.0  # without an answer, after which the head counts as lost, or is reported as silent
ACCEPT_SECONDS = 5.0  # in which the job server accepts a submission that a signal interrupted here
POLL_SECONDS = 1.0


class HeadLostError(UserError):
    """Ray's job server ended, or the connection to it, while a job ran."""


class HeadSilentError(HeadLostError):
    """Ray's job server does not answer: the job may still run."""


@dataclass(frozen=True)
class Ended:
    """The final state of a job; ``code`` is its exit code, or 1 if it failed and Ray reports none."""

    job: str
    status: str
    code: int


def new_id() -> str:
    """Return an id for a job that is to be submitted."""
    return f"raysubmit_{secrets.token_hex(8)}"


def submit(
    address: str, job: str, words: Sequence[str], environment: Mapping[str, Any], seconds: float
) -> None:
    """Submit ``words`` as ``job``, which is printed, to the job server at ``address``, unless that has it.

    `UserError` if it is refused. `HeadSilentError` if it may run: the answer was lost, and there is no other
    within ``seconds``.
    """
    from ray.exceptions import RayError

    client = None
    try:
        client = _within(SUBMIT_SECONDS, _client(address))  # asks for the server's version
        request = partial(client.submit_job, entrypoint=shlex.join(words), submission_id=job)
        _within(SUBMIT_SECONDS, partial(request, runtime_env=dict(environment)))
    except (OSError, RuntimeError, ValueError, RayError) as error:
        if client is None or not _has_job(address, job, seconds):
            raise UserError(f"Ray's job server at {address}: {summarize_ray_error(error)}") from None
    messages.info(f"job {job}")


def _client(address: str) -> Callable[[], Any]:
    """Ray's client of the job server at ``address``, which otherwise sends its requests to a proxy."""
    from ray.job_submission import JobSubmissionClient

    exclude_from_proxy(address)
    return partial(JobSubmissionClient, address)


def _has_job(address: str, job: str, seconds: float) -> bool:
    try:
        return bool(_info(address, job, seconds))
    except HeadSilentError:
        raise
    except HeadLostError:  # it does not know the job
        return False


def follow(address: str, job: str, write: Callable[[str], None], seconds: float) -> Ended:
    """Pass the output of ``job`` to ``write`` until it ends; return its final state.

    A connection that breaks, or is silently dropped, is made again. Raises `HeadLostError` if the job server
    does not know the job, `HeadSilentError` if it does not answer within ``seconds``.
    """

    def ask() -> Any:
        return _info(address, job, seconds)

    passed = 0  # characters
    while True:
        log, position = _Log(address, job), 0
        while (text := _next_text(log, ask)) is not None:
            position += len(text)
            if position > passed:
                write(text[passed - position :])
                passed = position
        info = ask()
        if (status := _status(info)) in ENDED:
            break
        time.sleep(POLL_SECONDS)
    if status != "SUCCEEDED":
        messages.error(f"job {job} {status.lower()}: {_first(info.message)}")
    code = getattr(info, "driver_exit_code", None)
    return Ended(job, status, 0 if status == "SUCCEEDED" else code or 1)


class _Log:
    """The output of a job from its beginning: ``texts``, then None when the connection has ended."""

    def __init__(self, address: str, job: str) -> None:
        self.texts: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(address, job), name="job log", daemon=True).start()

    def _read(self, address: str, job: str) -> None:
        from aiohttp import ClientError
        from ray.exceptions import RayError

        try:
            with contextlib.suppress(OSError, RuntimeError, RayError, ClientError):  # `_info` has the reason
                asyncio.run(_tail(_client(address)(), job, self.texts.put))
        finally:
            self.texts.put(None)


def _next_text(log: _Log, ask: Callable[[], Any]) -> str | None:
    """The next text of a log, None at its end; a silent one ends with its job, of which ``ask`` has news."""
    while True:
        try:
            return log.texts.get(timeout=SILENT_SECONDS)
        except queue.Empty:
            if _status(ask()) in ENDED:
                return None


def _info(address: str, job: str, seconds: float) -> Any:
    """Ray's ``JobDetails``; `HeadLostError` if its server does not know the job or answer in ``seconds``."""
    from ray.exceptions import RayError

    client = _client(address)
    begun, is_reported = time.monotonic(), False
    while True:
        try:
            return _within(ANSWER_SECONDS, lambda: client().get_job_info(job))
        except (OSError, RuntimeError, RayError) as error:
            why, silent = summarize_ray_error(error), time.monotonic() - begun
            if "does not exist" in str(error):
                raise HeadLostError(_lost(job, address, why), LOST) from None
            if silent > seconds:
                raise HeadSilentError(
                    f"Ray's head at {address} did not answer for {silent:.0f} s: {why}. Job {job} may still "
                    f"run: ray job logs -f {job}",
                    LOST,
                ) from None
            if silent > LOST_SECONDS and not is_reported:
                messages.warning(f"no answer from Ray's head for {silent:.0f} of {seconds:.0f} s: {why}")
                is_reported = True
        time.sleep(POLL_SECONDS)


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """Return the result of ``call``, or raise its error; `TimeoutError` after ``seconds``."""
    outcomes: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcomes.put((call(), None))
        except Exception as error:
            outcomes.put((None, error))

    threading.Thread(target=run, name="job server", daemon=True).start()
    try:
        result, error = outcomes.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:.0f} s") from None
    if error is not None:
        raise error
    return result


def _status(info: Any) -> str:
    return str(getattr(info.status, "value", info.status))


def ray_job(address: str, job: str, seconds: float) -> str:
    """Return the id that Ray's processes know ``job`` by; empty if its driver has not connected to Ray.

    `TimeoutError` if the job server does not answer in ``seconds``, or in `ANSWER_SECONDS` if these are less.
    """
    client, limit = _client(address), min(seconds, ANSWER_SECONDS)
    return str(_within(limit, lambda: client().get_job_info(job)).job_id or "")


def stop(address: str, job: str) -> bool:
    """Stop ``job``; return whether it has ended, within `STOP_SECONDS`. A warning if not."""
    from ray.exceptions import RayError

    client = _client(address)

    def has_ended() -> bool:
        return _status(client().get_job_info(job)) in ENDED

    begun, is_requested = time.monotonic(), False
    while True:
        why: Exception = TimeoutError(f"it has not ended in {STOP_SECONDS:.0f} s")
        try:
            if not is_requested:
                if not _within(ANSWER_SECONDS, lambda: client().stop_job(job)):
                    return True
                is_requested = True
            if _within(ANSWER_SECONDS, has_ended):
                return True
        except (OSError, RuntimeError, RayError) as error:  # the next answer may be one
            why = error
            if "does not exist" in str(error) and time.monotonic() > begun + ACCEPT_SECONDS:
                return True  # it was not submitted, or its head has ended
        if time.monotonic() > begun + STOP_SECONDS:
            reason = summarize_ray_error(why)
            messages.warning(f"job {job} may still run after its stop was requested: {reason}")
            return False
        time.sleep(POLL_SECONDS)


def _lost(job: str, address: str, why: str) -> str:
    return (
        f"Ray's head at {address} was lost while job {job} ran: {why}. If the head ended, its jobs ended "
        "too, and a restarted head does not know them: submit the command again, with the flag that loads "
        "its last checkpoint"
    )


def _first(message: str | None) -> str:
    """The first line of a message, without the log lines that Ray appends."""
    return (message or "no reason").split(", last available logs")[0].splitlines()[0]


async def _tail(client: Any, job: str, write: Callable[[str], None]) -> None:
    async for lines in client.tail_job_logs(job):
        write(lines)
