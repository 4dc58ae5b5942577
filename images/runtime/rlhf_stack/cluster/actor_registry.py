"""Names of actors that Ray has lost: Ray's error gives an id, at best an address, but no rank or engine.

Each actor that holds a model stores a record of itself when it starts. The process that receives Ray's error
looks the record up.
"""

import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rlhf_stack.cluster import gcs_kv
from rlhf_stack.compat import ray_private
from rlhf_stack.lazy import ray
from rlhf_stack.telemetry import run_log

# What gloo, NCCL and sockets report when the other end of a collective was lost.
CUT_OFF = re.compile(r"(?i)connection (closed|reset|refused)|broken pipe|remote process exited|timed out")
NOTICE_SECONDS = 30.0  # within which Ray notices that a process or a node has died
POLL_SECONDS = 0.5


class PeerError(RuntimeError):
    """An actor of the run is dead or unreachable; the message names the actor and its node."""


def register_actor(who: str) -> None:
    """Store a record of this process under the name ``who`` ("engine 0"), if it is a Ray actor."""
    if not ray.is_initialized():
        return
    context = ray.get_runtime_context()
    if (actor := context.get_actor_id()) is not None:
        record = own_record(who) | {"actor": actor, "job": str(context.get_job_id())}
        gcs_kv.report_record(_key(actor), record)


def register_rank(actor: Any, rank: int) -> None:
    """Register this process as ``rank`` of the role that the class of ``actor`` implements."""
    register_actor(f"rank {rank} of {type(actor).__name__}")


@contextmanager
def translate_actor_errors(what: str = "") -> Iterator[None]:
    """Turn Ray's error for a lost actor, raised in this context, into a `PeerError` that names the actor.

    ``what`` is the operation, for the message. Ray's error is raised unchanged if the actor's own
    constructor failed, because it has the cause. The error of an actor that was cut off in a collective has
    at best an address, so the message lists the lost actors of the job.
    """
    try:
        yield
    except PeerError as error:  # from a nested wait, here or in another process
        cause = getattr(error, "cause", error)
        raise PeerError(_text(what, str(cause))) from error
    except ray.exceptions.RayActorError as error:
        if error.actor_init_failed:
            raise
        raise PeerError(_text(what, describe_lost_actor(error))) from error
    except ray.exceptions.RayTaskError as error:
        reason = str(error.cause).strip().partition("\n")[0]
        if not CUT_OFF.search(reason) or not (lost := _lost_actors()):
            raise
        why = f"{' and '.join(lost)} died, and others were cut off: {reason}"
        raise PeerError(_text(what, why)) from error


def own_record(who: str) -> dict[str, str]:
    """Return the record of this process, named ``who``, in the form that `describe` takes."""
    return {"who": who, "host": socket.gethostname(), "address": ray.util.get_node_ip_address()}


def describe_lost_actor(error: Any) -> str:
    """Describe the actor of a ``RayActorError``, or of a task error whose cause is one, in a sentence."""
    state = "is dead"
    if isinstance(error, getattr(ray.exceptions, "ActorUnavailableError", ())):  # newer than Ray 2.12.0
        state = "cannot be reached, and Ray cannot tell yet whether it is dead"
    reason = str(getattr(error, "cause", error)).strip().splitlines()[-1].strip()
    return f"{_name(getattr(error, 'actor_id', None))} {state}: {reason}"


def describe_callee(reference: Any) -> str:
    """Describe the actor, and its node, that computes the result ``reference`` of a call."""
    return _name(reference.task_id().actor_id().hex())


def describe(record: dict[str, Any], ranks: Sequence[dict[str, Any]]) -> str:
    """Describe an actor and its node from its ``record`` and the records of its engine's ``ranks``."""
    text = f"{record['who']} on node {record['host']} ({record['address']})"
    places = [
        f"rank {rank['rank']}" + ("" if rank["host"] == record["host"] else f" on node {rank['host']}")
        for rank in sorted(ranks, key=lambda rank: int(rank["rank"]))
    ]
    return f"{text} with its {', '.join(places)}" if places else text


def _lost_actors() -> list[str]:
    """Describe the dead actors of this job, as soon as Ray reports one.

    It raises nothing: an error of this lookup must not take the place of the one that it explains.
    """
    records: list[dict[str, Any]] = []
    end = time.monotonic() + NOTICE_SECONDS
    while True:
        dead, problem = [], ""
        try:
            records = records or _actors_of_this_job()
            dead = [describe(record, []) for record in records if _is_dead(record)]
        except Exception as error:  # of any type: Ray's differ from release to release
            problem = str(error)
        if dead or time.monotonic() > end:
            if problem:
                run_log.warning(f"lost actors cannot be named, because Ray's head does not answer: {problem}")
            return dead
        time.sleep(POLL_SECONDS)


def _actors_of_this_job() -> list[dict[str, Any]]:
    job = str(ray.get_runtime_context().get_job_id())
    return [record for record in gcs_kv.list_records(_key("")) if record["job"] == job]


def _is_dead(record: dict[str, Any]) -> bool:
    return ray_private.actor_state(record["actor"]).get("State") == "DEAD"


def _text(what: str, why: str) -> str:
    return f"{what}: {why}" if what else why


def _key(actor: str) -> str:
    return f"actor/{actor}"


def _name(actor: str | None) -> str:
    """Describe an actor by its own record, otherwise by Ray's."""
    if actor is None:
        return "an actor"
    try:
        found = gcs_kv.list_records(_key(actor))
        if found:
            (record,) = found
            return describe(record, gcs_kv.list_records(f"{record['job']}/{record['who']} rank "))
        return _name_from_ray(actor)
    except Exception as error:  # the head was lost too, and Ray's types differ from release to release
        return f"actor {actor} (Ray's head does not report its name: {error})"


def _name_from_ray(actor: str) -> str:
    state = ray_private.actor_state(actor)
    if not state:
        return f"actor {actor}"
    return f"{state['ActorClassName']} on {state['Address']['IPAddress'] or 'a node that it did not reach'}"
