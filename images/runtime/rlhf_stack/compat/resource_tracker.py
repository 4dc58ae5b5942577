"""Keep Python's resource tracker alive when Ray ends the process that started it.

The tracker unlinks the shared-memory segments and semaphores of a process and its descendants when all of
them have ended. It is a child of the first, and Ray kills the children of an actor that ends.
"""

from collections.abc import Sequence
from multiprocessing import resource_tracker, util
from unittest import mock

_spawn = util.spawnv_passfds
FORK_PREFIX = "import os\nif os.fork():\n    os._exit(0)\n"


def detach() -> None:
    """Start the tracker of this process, if none runs, detached from the process tree."""
    with mock.patch.object(util, "spawnv_passfds", _spawn_grandchild):
        resource_tracker.ensure_running()


def _spawn_grandchild(path: bytes, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Run Python code as `util.spawnv_passfds` does, in a child of a child that exits at once."""
    *options, code = arguments
    return _spawn(path, [*options, FORK_PREFIX + code], descriptors)
