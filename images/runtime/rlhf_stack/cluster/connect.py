"""Connections of commands to a running Ray cluster."""

import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from typing import Any

from rlhf_stack.cluster import auth_token
from rlhf_stack.cluster.host import wait_for_port
from rlhf_stack.cluster.start_command import with_port
from rlhf_stack.errors import UserError
from rlhf_stack.lazy import ray

ANSWER_SECONDS = 10.0


def connect(address: str = "auto", show_workers: bool = False) -> None:
    """Connect as a driver to the cluster at ``address``, by default that of this machine.

    ``show_workers``: print what the workers of this driver print.

    This process keeps its own handler of SIGTERM, which Ray replaces. Raises `UserError` if no cluster
    answers.
    """
    handler = signal.getsignal(signal.SIGTERM)
    auth_token.is_available(os.environ)  # an unusable one is an error here, and a riddle in Ray
    if address != "auto":  # Ray itself would retry for minutes
        wait_for_port(with_port(address), ANSWER_SECONDS)
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # tips of Ray
            ray.init(address=address, log_to_driver=show_workers, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        where = "on this machine" if address == "auto" else f"at {address}"
        raise UserError(f"no Ray cluster {where}: {summarize_ray_error(error)}") from None
    finally:
        _handle_sigterm(handler)


def summarize_ray_error(error: Exception) -> str:
    """Return the first line of Ray's ``error``, or the remedy if a token is missing."""
    if type(error).__name__ == "AuthenticationError":  # a class that Ray 2.12 does not have
        return f"it requires the head's token, which this machine does not have: {auth_token.REMEDY}"
    return (str(error).strip().splitlines() or ["no answer"])[0]


@contextmanager
def connected(address: str = "auto", show_workers: bool = False) -> Iterator[None]:
    """Connect to the cluster at ``address`` for the duration of the context; see `connect`.

    ``sys.stdout`` is the standard error meanwhile.
    """
    handler = signal.getsignal(signal.SIGTERM)
    with off_stdout():
        connect(address, show_workers)
        try:
            yield
        except getattr(ray.exceptions, "RpcError", ()) as error:  # of a head that does not answer for a while
            raise UserError(f"Ray's head does not answer: {summarize_ray_error(error)}") from error
        finally:
            ray.shutdown()
            _handle_sigterm(handler)


def off_stdout() -> AbstractContextManager[Any]:
    """Redirect ``sys.stdout`` to the standard error.

    A connected Ray prints there what it reports of nodes and of the autoscaler, in a thread that ends with
    the connection, whatever its ``log_to_driver``.
    """
    return redirect_stdout(sys.stderr)


def _handle_sigterm(handler: Any) -> None:
    if callable(handler) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
