"""The process that removes what dead processes have named in /dev/shm, kept from being killed with them.

Python's resource tracker unlinks the segments and semaphores of a process and of all that it spawned, once
all of them have ended. It is a child of the first, and Ray kills the children of an actor that ends.
"""

from collections.abc import Sequence
from multiprocessing import resource_tracker, util
from unittest import mock

_spawn = util.spawnv_passfds
FROM_A_GRANDCHILD = "import os\nif os.fork():\n    os._exit(0)\n"


def detach() -> None:
    """Start the tracker of this process, if it has none yet, as nobody's child."""
    with mock.patch.object(util, "spawnv_passfds", _spawn_grandchild):
        resource_tracker.ensure_running()


def _spawn_grandchild(path: bytes, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """As `util.spawnv_passfds`, of Python code, in a child of a child that has ended."""
    *before, code = arguments
    return _spawn(path, [*before, FROM_A_GRANDCHILD + code], descriptors)
