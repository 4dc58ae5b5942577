"""Who an actor is that Ray has lost: Ray's own error has its id, at best an address, and no rank or engine.

Each actor that holds a model leaves a record of itself when it starts; whoever gets the error reads it.
"""

import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rlhf_stack.cluster import gcs_kv

# How gloo, NCCL and sockets say that the other end of a collective has gone.
CUT_OFF = re.compile(r"(?i)connection (closed|reset|refused)|broken pipe|remote process exited|timed out")
NOTICE_SECONDS = 30.0  # in which Ray learns that a process or a node has died
POLL_SECONDS = 0.5


class PeerError(RuntimeError):
    """An actor of the run is dead or cannot be reached; the text says which one, and where it was."""


def introduce(who: str) -> None:
    """This process goes by ``who`` ("engine 0") in errors, if it is an actor of Ray."""
    import ray

    if not ray.is_initialized():
        return
    context = ray.get_runtime_context()
    if (actor := context.get_actor_id()) is not None:
        gcs_kv.put(_key(actor), here(who) | {"actor": actor, "job": str(context.get_job_id())})


def introduce_rank(actor: Any, rank: int) -> None:
    """This process is ``rank`` of the role whose models are of the class of ``actor``."""
    introduce(f"rank {rank} of {type(actor).__name__}")


@contextmanager
def named(what: str = "") -> Iterator[None]:
    """Around a wait for actors: Ray's error for one that is lost becomes a `PeerError`, which says who it is.

    ``what`` was done, for the error. One that died of an error in its own constructor says what happened. An
    actor that was cut off from another in a collective knows an address at best: the dead are named with it.
    """
    import ray

    try:
        yield
    except PeerError as error:  # from a wait within this one, here or in another process
        cause = getattr(error, "cause", error)
        raise PeerError(_text(what, str(cause))) from error
    except ray.exceptions.RayActorError as error:
        if error.actor_init_failed:
            raise
        raise PeerError(_text(what, lost(error))) from error
    except ray.exceptions.RayTaskError as error:
        reason = str(error.cause).strip().partition("\n")[0]
        if not CUT_OFF.search(reason) or not (dead := _dead()):
            raise
        why = f"{' and '.join(dead)} died, and others were cut off: {reason}"
        raise PeerError(_text(what, why)) from error


def here(who: str) -> dict[str, str]:
    """What `describe` needs of this process, which goes by ``who``."""
    import ray

    return {"who": who, "host": socket.gethostname(), "address": ray.util.get_node_ip_address()}


def lost(error: Any) -> str:
    """A sentence on the actor of Ray's ``RayActorError``, or of a task's error that has one as its cause."""
    import ray

    state = "is dead"
    if isinstance(error, getattr(ray.exceptions, "ActorUnavailableError", ())):  # newer than Ray 2.12.0
        state = "cannot be reached, and Ray cannot tell yet whether it is dead"
    reason = str(getattr(error, "cause", error)).strip().splitlines()[-1].strip()
    return f"{_who(getattr(error, 'actor_id', None))} {state}: {reason}"


def of(reference: Any) -> str:
    """The actor that owes the result of a call to it, and its node."""
    return _who(reference.task_id().actor_id().hex())


def describe(record: dict[str, Any], ranks: Sequence[dict[str, Any]]) -> str:
    """An actor and its node by its ``record``; ``ranks`` are those of an engine's workers, in any order."""
    text = f"{record['who']} on node {record['host']} ({record['address']})"
    places = [
        f"rank {rank['rank']}" + ("" if rank["host"] == record["host"] else f" on node {rank['host']}")
        for rank in sorted(ranks, key=lambda rank: int(rank["rank"]))
    ]
    return f"{text} with its {', '.join(places)}" if places else text


def _dead() -> list[str]:
    """The actors of this job's models that are dead, as soon as Ray knows of one."""
    import ray
    from ray._private import state

    job = str(ray.get_runtime_context().get_job_id())
    records = [record for record in gcs_kv.under(_key("")) if record["job"] == job]
    end = time.monotonic() + NOTICE_SECONDS
    while True:
        states = {record["actor"]: state.actors(record["actor"]).get("State") for record in records}
        dead = [describe(record, []) for record in records if states[record["actor"]] == "DEAD"]
        if dead or time.monotonic() > end:
            return dead
        time.sleep(POLL_SECONDS)


def _text(what: str, why: str) -> str:
    return f"{what}: {why}" if what else why


def _key(actor: str) -> str:
    return f"actor/{actor}"


def _who(actor: str | None) -> str:
    """The actor by what it told of itself, else by what Ray knows of it."""
    import ray

    if actor is None:
        return "an actor"
    try:
        found = gcs_kv.under(_key(actor))
        if found:
            (record,) = found
            return describe(record, gcs_kv.under(f"{record['job']}/{record['who']} rank "))
        return _by_ray(actor)
    except ray.exceptions.RayError as error:  # the head is gone as well
        return f"actor {actor} (Ray's head does not say who it is: {error})"


def _by_ray(actor: str) -> str:
    from ray._private import state

    known = state.actors(actor)
    if not known:
        return f"actor {actor}"
    return f"{known['ActorClassName']} on {known['Address']['IPAddress'] or 'a node that it did not reach'}"
