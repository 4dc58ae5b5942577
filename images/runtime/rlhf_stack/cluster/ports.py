"""TCP ports of a Ray node."""

import random

LAST_PORT = 65535
RAY_DEFAULT_RANGE = 10002, 19999  # of workers, where `ray start` names no range
MIN_PORTS = 1000  # that a node keeps for its workers


def first_worker_port(first: int, last: int) -> int:
    """Return the port of a node's first worker: ``first``, or a random one in Ray's default range.

    A machine that is restarted would otherwise give its workers the ports of their predecessors, and what Ray
    still sends to a predecessor would reach another worker.
    """
    if (first, last) != RAY_DEFAULT_RANGE:
        return first
    return random.randint(first, last - MIN_PORTS)  # noqa: S311  (guessing it gains nothing)
