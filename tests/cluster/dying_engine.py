"""Kills an engine's processes while it generates: `install` is the RLHF_STACK_TEST_HOOK of each process.

DYING_PROCESS is "actor" or "core", vLLM's own process below the actor. Only the engine's first process dies.
"""

import os
import signal
import threading
import time
from pathlib import Path

from rlhf_stack.config import env_vars
from rlhf_stack.telemetry import events

ENGINE, PROCESS, STEP = "DYING_ENGINE", "DYING_PROCESS", "DYING_STEP"
CORE = "VLLM::EngineCore"
POLL_SECONDS = 0.02
INTO_GENERATION_SECONDS = 0.3


def install() -> None:
    """Watch, in the actor of engine DYING_ENGINE, for the generation of step DYING_STEP (from 1)."""
    threading.Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    folder = Path(os.environ[env_vars.EVENTS])
    while not os.environ.get("RLHF_STACK_ENGINE", "").endswith(f"/{os.environ[ENGINE]}"):
        time.sleep(POLL_SECONDS)
    import ray

    if ray.get_runtime_context().was_current_actor_reconstructed:
        return
    while _generations(folder) < int(os.environ[STEP]):
        time.sleep(POLL_SECONDS)
    time.sleep(INTO_GENERATION_SECONDS)
    os.kill(os.getpid() if os.environ[PROCESS] == "actor" else _core(), signal.SIGKILL)


def _generations(folder: Path) -> int:
    found = events.read(folder) if folder.is_dir() else []
    return sum(event["event"] == "begins" and event["name"] == "generation" for event in found)


def _core() -> int:
    """Return the process id of vLLM's engine process, a child of this one."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
            command = (path / "cmdline").read_text()
        except OSError:
            continue
        if int(parent) == os.getpid() and command.startswith(CORE):
            return int(path.name)
    raise RuntimeError(f"no child process {CORE}")
