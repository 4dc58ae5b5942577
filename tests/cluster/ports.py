"""TCP ports of tests."""

import socket

HELD = []


def free_port():
    """A port that no other socket gets: bound, without a listener, until this process ends.

    A server that reuses addresses, as all do that are tested here, can listen at it meanwhile.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    HELD.append(held)
    return held.getsockname()[1]
