"""The running Ray cluster that this machine belongs to, for commands that ask it something."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from rlhf_stack.cluster import auth_token
from rlhf_stack.cluster.host import wait_for
from rlhf_stack.cluster.start_command import with_port
from rlhf_stack.errors import UserError

ANSWER_SECONDS = 10.0


def connect(address: str = "auto") -> None:
    """Be a driver of the cluster, by default of this machine; a `UserError` if none answers."""
    import ray

    if address != "auto":  # Ray itself would try for minutes
        wait_for(with_port(address), ANSWER_SECONDS)
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # tips of Ray
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        where = "on this machine" if address == "auto" else f"at {address}"
        raise UserError(f"no Ray cluster {where}: {said(error)}") from None


def said(error: Exception) -> str:
    """What an error of Ray says, in one line; where a token is missing, what to do."""
    if type(error).__name__ == "AuthenticationError":  # a class that Ray 2.12 does not have
        return f"it asks for the head's token, which is not here: {auth_token.HOW}"
    return (str(error).strip().splitlines() or ["no answer"])[0]


@contextmanager
def connected(address: str = "auto") -> Iterator[None]:
    """`connect` for a while."""
    import ray

    connect(address)
    try:
        yield
    finally:
        ray.shutdown()
