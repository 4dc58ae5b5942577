"""A job of Ray's job server: submitted, followed until it ends, and stopped."""

import asyncio
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_stack.cluster.connect import summarize_ray_error
from rlhf_stack.errors import UserError

LOST = 122  # exit code: the connection to the running job was lost
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
STOP_SECONDS = 60.0


class HeadLostError(UserError):
    """Ray's job server ended, or the connection to it, while a job ran."""


@dataclass(frozen=True)
class Ended:
    """The final state of a job; ``code`` is its exit code, or 1 if it failed and Ray reports none."""

    job: str
    status: str
    code: int


def submit(address: str, words: Sequence[str], environment: Mapping[str, Any]) -> str:
    """Submit ``words`` to the job server at ``address``; return the id of the job, which is printed."""
    from ray.exceptions import RayError
    from ray.job_submission import JobSubmissionClient

    try:
        client = JobSubmissionClient(address)
        job = client.submit_job(entrypoint=shlex.join(words), runtime_env=dict(environment))
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise UserError(f"Ray's job server at {address}: {summarize_ray_error(error)}") from None
    print(f"rlhf-stack: job {job}", file=sys.stderr, flush=True)
    return str(job)


def follow(address: str, job: str, write: Callable[[str], None]) -> Ended:
    """Pass the output of ``job`` to ``write`` until it ends; return its final state.

    Raises `HeadLostError` if the job server does not answer any more or does not know the job.
    """
    from aiohttp import ClientError
    from ray.exceptions import RayError
    from ray.job_submission import JobSubmissionClient

    try:
        client = JobSubmissionClient(address)
        asyncio.run(_tail(client, job, write))
        info = client.get_job_info(job)
    except (OSError, RuntimeError, RayError, ClientError) as error:
        raise _lost(job, address, summarize_ray_error(error)) from None
    status = str(getattr(info.status, "value", info.status))
    if status not in ENDED:
        raise _lost(job, address, f"its log ended, but its status is {status}")
    if status != "SUCCEEDED":
        print(f"rlhf-stack: job {job} {status.lower()}: {_first(info.message)}", file=sys.stderr)
    code = getattr(info, "driver_exit_code", None)
    return Ended(job, status, 0 if status == "SUCCEEDED" else code or 1)


def ray_job(address: str, job: str) -> str:
    """Return the id that Ray's processes know ``job`` by; empty if its driver has not connected to Ray."""
    from ray.job_submission import JobSubmissionClient

    return str(JobSubmissionClient(address).get_job_info(job).job_id or "")


def stop(address: str, job: str) -> None:
    """Stop ``job``; return when it has ended or after `STOP_SECONDS`."""
    from ray.job_submission import JobSubmissionClient

    client = JobSubmissionClient(address)
    if client.stop_job(job):
        try:
            asyncio.run(asyncio.wait_for(_tail(client, job, lambda _: None), STOP_SECONDS))
        except TimeoutError:
            print(f"rlhf-stack: job {job} has not ended {STOP_SECONDS:.0f} s after its stop", file=sys.stderr)


def _lost(job: str, address: str, why: str) -> HeadLostError:
    return HeadLostError(
        f"Ray's head at {address} was lost while job {job} ran: {why}. If the head ended, its jobs ended "
        "too, and a restarted head does not know them: submit the command again, with the flag that loads "
        f"its last checkpoint. If only the connection was lost: ray job logs -f {job}",
        LOST,
    )


def _first(message: str | None) -> str:
    """The first line of a message, without the log lines that Ray appends."""
    return (message or "no reason").split(", last available logs")[0].splitlines()[0]


async def _tail(client: Any, job: str, write: Callable[[str], None]) -> None:
    async for lines in client.tail_job_logs(job):
        write(lines)
