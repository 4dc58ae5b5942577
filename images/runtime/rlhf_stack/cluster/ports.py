"""Where on a node the ports of Ray's workers begin."""

import random

OF_RAY = 10002, 19999  # what workers listen on, if `ray start` is told nothing
ENOUGH = 1000  # ports that a node keeps


def first_of_workers(first: int, last: int) -> int:
    """The port that the first worker of a node gets; ``first``, unless both are as Ray has them.

    Else another one at each start: a machine that comes back would give its workers the ports that those of
    before had, and what Ray still sends to one of these would reach another worker.
    """
    if (first, last) != OF_RAY:
        return first
    return random.randint(first, last - ENOUGH)  # noqa: S311  (nobody gains by guessing it)
