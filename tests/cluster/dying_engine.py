"""Kills an engine's processes in a phase of a run: `install` is the RLHF_STACK_TEST_HOOK of each process.

DYING_PROCESS is "actor", "core" (vLLM's own process below the actor) or "node", all processes of its node, or
"stopped": actor and core do not die but never run again.
DYING_PHASE is "start", "join" (the weight-sync group), or "generation", "sync" or "sleep" of step DYING_STEP
(from 1). It dies DYING_TIMES times (once by default), each time in the next step.
"""

import functools
import os
import signal
import threading
import time
from pathlib import Path

from rlhf_stack.config import env_vars
from rlhf_stack.telemetry import events

ENGINE, PROCESS, PHASE, STEP = "DYING_ENGINE", "DYING_PROCESS", "DYING_PHASE", "DYING_STEP"
TIMES = "DYING_TIMES"
CORE = "VLLM::EngineCore"
DEAD = "an-engine-has-died"
POLL_SECONDS = 0.02
INTO_GENERATION_SECONDS = 0.3


def install() -> None:
    """Watch, in the actor of engine DYING_ENGINE, for its phase."""
    threading.Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    while not os.environ.get("RLHF_STACK_ENGINE", "").endswith(f"/{os.environ[ENGINE]}"):
        time.sleep(POLL_SECONDS)
    phase = os.environ[PHASE]
    if phase in ("join", "sync", "sleep"):
        _die_in_call(phase)
        return
    if phase == "start":
        while not _core():
            time.sleep(POLL_SECONDS)
    if phase == "generation":
        while _generations() < int(os.environ[STEP]) + _deaths():
            time.sleep(POLL_SECONDS)
        time.sleep(INTO_GENERATION_SECONDS)
    _die()


def _die_in_call(phase: str) -> None:
    """Die when the engine joins, or in the sync or sleep of step DYING_STEP; it sleeps once before."""
    from vllm.v1.engine.async_llm import AsyncLLM

    step = int(os.environ[STEP])
    counts = {"join": step - 1, "sync": 0, "sleep": -1}
    phases = {"join_weight_group": "join", "receive_weights": "sync"}
    call, sleep = AsyncLLM.collective_rpc, AsyncLLM.sleep

    def count(name: str) -> None:
        counts[name] += 1
        if name == phase and counts[name] == step:
            _die()

    @functools.wraps(call)
    async def calls(self, method, args=()):
        worker_method = args[0] if method == "answer" else method  # see `WorkerMixin.answer`
        if worker_method in phases:
            count(phases[worker_method])
        return await call(self, method, args=args)

    @functools.wraps(sleep)
    async def sleeps(self, *arguments, **options):
        await sleep(self, *arguments, **options)
        count("sleep")

    AsyncLLM.collective_rpc, AsyncLLM.sleep = calls, sleeps


def _die() -> None:
    if (deaths := _deaths()) == int(os.environ.get(TIMES, "1")):
        return
    (_folder() / f"{DEAD}-{deaths + 1}").touch()
    number = signal.SIGSTOP if os.environ[PROCESS] == "stopped" else signal.SIGKILL
    if os.environ[PROCESS] in ("core", "node", "stopped"):
        (pid,) = _core()
        os.kill(pid, number)
    if os.environ[PROCESS] == "node":
        os.kill(os.getppid(), signal.SIGKILL)  # the raylet
    if os.environ[PROCESS] in ("actor", "node", "stopped"):
        os.kill(os.getpid(), number)


def _deaths() -> int:
    return len(list(_folder().glob(f"{DEAD}-*")))


def _folder() -> Path:
    return Path(os.environ[env_vars.EVENTS])


def _generations() -> int:
    found = events.read(_folder()) if _folder().is_dir() else []
    return sum(event["event"] == "begins" and event["name"] == "generation" for event in found)


def _core() -> list[int]:
    """Return the process id of vLLM's engine process, a child of this one; none before it has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
            command = (path / "cmdline").read_text()
        except OSError:
            continue
        if int(parent) == os.getpid() and command.startswith(CORE):
            found.append(int(path.name))
    return found
