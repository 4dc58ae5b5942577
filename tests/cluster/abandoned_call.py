"""An engine that stops before it has fallen asleep, and is restarted.

abandoned_call.py FILE: each of its processes appends its id and each method that it executes to FILE. The
trainer gives up the call of the stopped process; it wakes the new one up and never puts it to sleep.
"""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import ray
from rlhf_stack.engine.actor import AsyncEngineMixin

SECONDS = 6  # Ray repeated the call about two after the start of the new process


class Engine(AsyncEngineMixin):
    """An actor with an engine's methods."""

    def __init__(self, file):
        self._file = Path(file)

    def _note(self, method):
        with self._file.open("a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {method}\n")

    async def sleep(self):
        self._note("sleep")
        await asyncio.sleep(3600)

    async def wake_up(self):
        self._note("wake_up")
        return os.getpid()


def main():
    """Stop the first process in its call, have it restarted, and wait for calls of the second."""
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    file = Path(sys.argv[1])
    engine = ray.remote(max_restarts=1)(Engine).remote(str(file))
    first = ray.get(engine.wake_up.remote())
    given_up = engine.sleep.remote()
    while "sleep" not in file.read_text(encoding="utf-8"):
        time.sleep(0.05)
    os.kill(first, signal.SIGSTOP)
    ray.kill(engine, no_restart=False)
    awake = False
    while not awake:
        try:
            awake = ray.get(engine.wake_up.remote()) != first
        except ray.exceptions.ActorUnavailableError:
            time.sleep(0.1)
    ray.wait([given_up], timeout=SECONDS)
    ray.shutdown()


if __name__ == "__main__":
    main()
