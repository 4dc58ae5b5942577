"""A training run on a cluster, followed by its events, by what it prints, and by what it leaves behind."""

import json
import re
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlhf_stack.telemetry import events

from scripts.errors import UserError
from scripts.release.fault_cases import GENERATION, START, SYNC, TRAINING, Outcome
from scripts.testing import demo
from scripts.testing.cluster import Cluster
from tests.faults.runs import CHECKPOINTS
from tests.network import remote

EVENTS = "/events"
STEPS = 400  # prompts for more steps than any run here does
POLL_SECONDS = 0.05
REACH_SECONDS = 300.0
HANG_SECONDS = 240.0
LEFT_SECONDS = 30.0
GOES_ON = 2  # steps while the fault lasts
WHY_DEAD = "The actor died because"
COLOUR = re.compile(r"\x1b\[\d+m")
OF_AN_ACTOR = re.compile(r"\(\w+[^)]* pid=")
ENVIRONMENT = {
    "RLHF_STACK_EVENTS": EVENTS,
    "RLHF_STACK_SYNC_TIMEOUT": "20",
    "RLHF_STACK_SYNC_BUCKET_MB": "0.02",
    "RLHF_STACK_ENGINE_TIMEOUT": "120",
    "RLHF_STACK_PLACEMENT_TIMEOUT": "60",
    "HF_HUB_OFFLINE": "1",
}
SUBMIT = ("rlhf-stack", "submit", "--address", remote.SERVER, "--")
SUBMITTED = "rlhf-stack: job "
REAP = ("rlhf-stack", "reap", "--older-than", "0")
RESERVED = f"""
import json
from ray.util.state import list_actors, list_placement_groups
at = {{"address": "{demo.DASHBOARD}", "limit": 1000}}
found = [f"actor {{one.class_name}}" for one in list_actors(filters=[("state", "!=", "DEAD")], **at)]
groups = list_placement_groups(filters=[("state", "!=", "REMOVED")], **at)
print(json.dumps(found + [f"placement group {{one.state}}" for one in groups]))
"""


class Job:
    """A run, submitted on the last node; its events are in ``folder``, which is emptied first.

    ``trains`` is in what it prints when training begins.
    """

    def __init__(self, cluster: Cluster, command: list[str], trains: str, folder: Path, log: Path) -> None:
        self._cluster, self._trains, self._folder = cluster, trains, folder
        for file in folder.glob("*.jsonl"):
            file.unlink()
        self.begins_after = saved_step(cluster)
        self.printed: list[str] = []
        self._log = demo.JobLog(log)
        self.ended_at = 0.0
        pool = ThreadPoolExecutor(1)
        self._code = pool.submit(self._follow, [*SUBMIT, *command])
        pool.shutdown(wait=False)

    @property
    def ended(self) -> bool:
        """Whether the command that the user waits for has ended."""
        return self._code.done()

    @property
    def refused(self) -> bool:
        """Whether it was not submitted, for want of room; waits until that is known."""
        self.wait(lambda: bool(self._submitted), REACH_SECONDS)
        return not self._submitted

    @property
    def _submitted(self) -> list[str]:
        """The line that says its id, once it is there."""
        return [line for line in tuple(self.printed) if line.startswith(SUBMITTED)]

    def events(self, name: str) -> list[dict[str, Any]]:
        """Those of one kind so far."""
        return [event for event in events.read(self._folder) if event["event"] == name]

    def steps(self, since: float = 0.0) -> list[int]:
        """The numbers of the steps that were done after ``since``, in unix seconds."""
        return [int(event["step"]) for event in self.events("step") if event["time"] > since]

    def wait(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Until ``holds``; False if the job ended before, or after ``seconds``."""
        deadline = time.monotonic() + seconds
        while not holds():
            if self.ended or time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def reach(self, phase: str) -> int:
        """Until the run is in ``phase``, of a step after those done; a `UserError` if it never is.

        The answer is `beyond` of then.
        """
        seen = self._count(phase)
        if not self.wait(lambda: self._count(phase) > seen, REACH_SECONDS):
            raise UserError(f"the run did not come to {phase}: {demo.cause(self.printed)}")
        return self.beyond(phase)

    def beyond(self, phase: str) -> int:
        """How often what is not ``phase`` has begun or, of a step, ended.

        ``phase`` itself may begin again while it lasts: each rank of OpenRLHF 0.5 has its own generation.
        """
        others = (other for other in (GENERATION, SYNC, TRAINING) if other != phase)
        return sum(map(self._count, others)) + len(self.steps())

    def first_step(self) -> int:
        """The number of the first step that this run did; a `UserError` if it does none."""
        if not self.wait(lambda: bool(self.steps()), REACH_SECONDS):
            raise UserError(f"no step was done: {demo.cause(self.printed)}")
        return self.steps()[0]

    def address(self, phase: str) -> str:
        """The node that a fault in ``phase`` hits: that of the trainer's last rank or that of the engine.

        Waits for them to be placed, and for the first step unless ``phase`` is the start.
        """
        if not self.wait(lambda: bool(self.events("placement")), REACH_SECONDS):
            raise UserError(f"nothing was placed: {demo.cause(self.printed)}")
        if phase != START:
            self.first_step()
        return self.ranks[-1] if phase == TRAINING else str(self._placed["engines"][0][0])

    @property
    def ranks(self) -> list[str]:
        """The nodes of the trainer's ranks."""
        return [str(address) for address in self._placed["groups"]["actor"]]

    def outcome(self) -> tuple[Outcome, float]:
        """What becomes of it from now on, and after how many seconds."""
        begun, since = time.monotonic(), time.time()
        self.wait(lambda: len(self.steps(since)) >= GOES_ON, HANG_SECONDS)
        if self.ended:
            return "ended", max(0.0, self.ended_at - begun)
        goes_on = len(self.steps(since)) >= GOES_ON
        return "goes on" if goes_on else "hangs", time.monotonic() - begun

    def said(self, after: int, nodes: Collection[str]) -> tuple[str, bool]:
        """The line with the error, and whether the driver's own text names one of ``nodes``.

        Both from what was printed ``after`` so many lines. Ray tells in a line of its own why an actor died.
        """
        lines = [COLOUR.sub("", line).strip() for line in self.printed[after:]]
        why = [line for line in lines if line.startswith(WHY_DEAD)]
        told = demo.cause(lines) + (f" ... {why[-1]}" if why else "")
        own = [line for line in lines if not OF_AN_ACTOR.match(line)]
        return told, any(node in line for line in own for node in nodes)

    def stop(self) -> None:
        """End it, if it runs."""
        if not self.ended:
            name = self._submitted[0].removeprefix(SUBMITTED)
            stop = ["ray", "job", "stop", "--address", demo.DASHBOARD, name]
            self._cluster.output(self._cluster.head, stop)

    @property
    def _placed(self) -> dict[str, Any]:
        (placed,) = self.events("placement")
        return placed

    def _count(self, phase: str) -> int:
        if phase == START:
            return sum(event["rank"] is not None for event in self.events("engine start"))
        if phase == TRAINING:
            return sum(self._trains in line for line in tuple(self.printed))
        return sum(
            event["name"] == {GENERATION: "generation", SYNC: "sync"}[phase]
            for event in self.events("begins")
        )

    def _print(self, line: str) -> None:
        self._log.write(line)
        self.printed.append(line)

    def _follow(self, command: list[str]) -> int:
        try:
            desk = self._cluster.containers[-1]
            return self._cluster.follow(command, self._print, nodes_may_end=True, container=desk)
        finally:
            self.ended_at = time.monotonic()


def saved_step(cluster: Cluster) -> int:
    """The step of the last checkpoint, 0 without one."""
    latest = cluster.output(
        cluster.head, ["sh", "-c", f"cat {CHECKPOINTS}/_actor/latest 2>/dev/null || true"]
    )
    return int(latest.strip().removeprefix("global_step") or 0)


def left_behind(cluster: Cluster) -> list[str]:
    """What is there of runs that are over, after a while in which it may go."""
    deadline = time.monotonic() + LEFT_SECONDS
    while (found := _left(cluster)) and time.monotonic() < deadline:
        time.sleep(1.0)
    return found


def end(cluster: Cluster) -> None:
    """End what is left, as a user would, so that the next run finds none of it; a `UserError` if some stays."""
    for container in cluster.containers:
        cluster.output(container, [*REAP, "--yes"])
    if found := left_behind(cluster):  # it takes Ray a moment to see that what was ended has ended
        raise UserError(f"rlhf-stack reap --yes did not end {'; '.join(found)}")


def _left(cluster: Cluster) -> list[str]:
    found: list[str] = json.loads(cluster.output(cluster.head, ["python", "-c", RESERVED]).splitlines()[-1])
    look = ["sh", "-c", f"{' '.join(REAP)} --json || test $? = 1"]
    for container in cluster.containers:
        told = json.loads(cluster.output(container, look))
        found += [f"{one['kind']} {one['what']}" for one in told["left"]]
    return found
