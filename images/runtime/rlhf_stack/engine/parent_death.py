"""Kill this process when its parent dies, while it would not notice the death itself.

A vLLM 0.29 worker notices the death of its engine only after it has loaded the model, and never while it
waits for the engine's handshake (``MessageQueue.wait_until_ready``). An engine that is killed during startup
would leave its workers, with their GPU memory.
"""

import ctypes
import multiprocessing
import os
import signal

PR_SET_PDEATHSIG = 1  # of Linux


def set_parent_death_signal() -> None:
    """Make the kernel kill this process when its parent dies; does nothing outside a `multiprocessing` child.

    For the kernel the parent is the thread that created this process. Raises OSError if the kernel refuses.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    _prctl(signal.SIGKILL)
    if os.getppid() != parent.pid:  # the parent died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def clear_parent_death_signal() -> None:
    """Undo `set_parent_death_signal`."""
    _prctl(0)


def _prctl(signal_number: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
