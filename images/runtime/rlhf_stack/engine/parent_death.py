"""A process that ends when its parent does, for as long as the parent cannot end it otherwise.

A worker of vLLM 0.29 finds out that its engine has died, but not before it has loaded the model, and not at
all while it waits for the engine's handshake (``MessageQueue.wait_until_ready``): an engine that is killed
while it starts would leave its workers, with what they have on the GPU.
"""

import ctypes
import multiprocessing
import os
import signal

SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux


def tie() -> None:
    """From now on this process is killed when its parent dies; nothing if `multiprocessing` did not make it.

    To the kernel the parent is the thread that made this process. OSError if the kernel refuses.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    _set(signal.SIGKILL)
    if os.getppid() != parent.pid:  # it died before
        os.kill(os.getpid(), signal.SIGKILL)


def untie() -> None:
    """End `tie`."""
    _set(0)


def _set(number: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(SET_DEATH_SIGNAL, number, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
