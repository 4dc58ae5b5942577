"""The running Ray cluster that this machine belongs to, for commands that ask it something."""

from collections.abc import Iterator
from contextlib import contextmanager

from rlhf_stack.problem import Problem


@contextmanager
def connected(address: str = "auto") -> Iterator[None]:
    """Be a driver of the cluster, by default of this machine, for a while; a `Problem` if none answers."""
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        first = (str(error).strip().splitlines() or ["no answer"])[0]
        if address != "auto":
            raise Problem(f"no Ray cluster at {address}: {first}") from None
        raise Problem(f"no Ray node runs on this machine ({first}): start one with ray start") from None
    try:
        yield
    finally:
        ray.shutdown()
