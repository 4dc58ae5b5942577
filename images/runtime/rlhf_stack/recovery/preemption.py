"""Asks the runs of a cluster for a checkpoint before a machine or a job is taken away.

A request and its answers are records in the key-value store of Ray's GCS. `checkpoint_on_request` in the
trainer sees a request within a second, confirms it, and answers when it has saved or cannot.
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rlhf_stack.cluster import gcs_kv

REQUESTS, ANSWERS = "preemption/requests/", "preemption/answers/"
CONFIRM_SECONDS = 5.0  # after which a run that has not confirmed a request will not
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Request:
    """A checkpoint within ``seconds`` is asked of Ray job ``job``; of every job if that is empty."""

    id: str
    job: str
    seconds: float


@dataclass(frozen=True)
class Answer:
    """The reply of Ray job ``job``: ``step`` (0: none) is in a checkpoint if ``saved``, else ``problem``.

    ``done`` is False while it confirms the request only. ``seconds`` is the duration of the save.
    """

    job: str
    done: bool = False
    saved: bool = False
    step: int = 0
    seconds: float = 0.0
    problem: str = ""


def request(seconds: float, job: str = "", may_continue: bool = True) -> list[Answer]:
    """Ask for a checkpoint; return the answers when all are there, or after ``seconds``.

    A run that saved it begins its next step then if it ``may_continue``, otherwise after ``seconds``. Returns
    no answer if no run confirms the request within `CONFIRM_SECONDS`. Requires a connection to Ray.
    """
    begun = time.monotonic()
    asked = Request(uuid.uuid4().hex, job, seconds)
    gcs_kv.put_record(REQUESTS + asked.id, asdict(asked))
    try:
        return _wait_for_answers(asked, begun)
    finally:
        if may_continue:
            gcs_kv.put_record(REQUESTS + asked.id, {})


def open_requests(job: str) -> list[Request]:
    """Return the requests to Ray job ``job`` that were not withdrawn."""
    found = [Request(**record) for record in gcs_kv.list_records(REQUESTS) if record]
    return [one for one in found if one.job in ("", job)]


def answer(asked: Request, reply: Answer) -> None:
    """Store ``reply`` for the sender of a request; it replaces the job's reply before."""
    gcs_kv.put_record(f"{ANSWERS}{asked.id}/{reply.job}", asdict(reply))


def describe(replies: Sequence[Answer]) -> list[str]:
    """Return a line for each reply."""
    return [_line(reply) for reply in replies]


def _wait_for_answers(asked: Request, begun: float) -> list[Answer]:
    while True:
        passed = time.monotonic() - begun
        replies = [Answer(**record) for record in gcs_kv.list_records(f"{ANSWERS}{asked.id}/")]
        is_complete = bool(asked.job and replies) or passed > CONFIRM_SECONDS  # every run had time to confirm
        if passed > asked.seconds or (is_complete and all(reply.done for reply in replies)):
            return replies
        time.sleep(POLL_SECONDS)


def _line(reply: Answer) -> str:
    if reply.saved:
        return f"the checkpoint of step {reply.step} was saved in {reply.seconds:.0f} s"
    if reply.done:
        return f"no checkpoint was saved: {reply.problem}"
    return "the checkpoint was not complete in time"
