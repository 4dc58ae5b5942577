"""A training run on a cluster, observed by its events, its output, and the resources that it leaves."""

import json
import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlhf_stack.demo.tiny_run import PROMPTS_PER_STEP
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
# After its repair a run may use all its deadlines in turn (`--node-wait`, placement, start of an engine) and
# then trains: 240 s was less than these. A run that continues does not wait for the end of it.
HANG_SECONDS = 480.0
TEST_SECONDS = 7200.0  # four phases that hang, each with a new run, and before an undisturbed run of 20 min
LEFT_SECONDS = 30.0
STOP_SECONDS = 120.0
STEPS_TO_GO_ON = 2
LASTS_SECONDS = 100.0  # a fault during which the run does not go on; Ray finds a node dead after a minute
WHY_DEAD = "The actor died because"
COLOUR = re.compile(r"\x1b\[\d+m")
OF_AN_ACTOR = re.compile(r"\(\w+[^)]* pid=[^)]*\)")
ENVIRONMENT = {
    "RLHF_STACK_EVENTS": EVENTS,
    "RLHF_STACK_SYNC_TIMEOUT": "20",
    "RLHF_STACK_SYNC_BUCKET_MB": "0.02",
    "RLHF_STACK_ENGINE_TIMEOUT": "120",
    "RLHF_STACK_PLACEMENT_TIMEOUT": "60",
    "RLHF_STACK_ENGINE_RESTARTS": "20",
    "RLHF_STACK_REPEATABLE": "1",
    "HF_HUB_OFFLINE": "1",
}
SUBMIT = ("rlhf-stack", "submit", "--address", remote.SERVER, "--restarts", "8", "--node-wait", "180", "--")
SUBMITTED = re.compile(r"rlhf-stack: job (\w+)")  # the whole line: another one reports its end
REAP = ("rlhf-stack", "reap", "--older-than", "0")
RESERVED = f"""
import json
from ray.util.state import list_actors, list_placement_groups
at = {{"address": "{demo.DASHBOARD}", "limit": 1000}}
found = [f"actor {{one.class_name}}" for one in list_actors(filters=[("state", "!=", "DEAD")], **at)]
groups = list_placement_groups(filters=[("state", "!=", "REMOVED")], **at)
print(json.dumps(found + [f"placement group {{one.state}}" for one in groups]))
"""


def names_one(error: str, nodes: Collection[str]) -> bool:
    """Whether an error names one of ``nodes`` itself; Ray puts the address of an actor before its output."""
    return any(node in OF_AN_ACTOR.sub("", error) for node in nodes)


def run_placement(placements: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the newest of ``placements`` that is of a whole run; an engine that moves has one of its own."""
    return next(event for event in reversed(placements) if "actor" in event["groups"])


def generated_again(of_run: Iterable[Mapping[str, Any]], steps: int, generations: int) -> int:
    """Return how many prompts were generated again during ``steps`` steps, from the events ``of_run``.

    These are the prompts that a lost engine had not answered, and the batches whose generation began again
    after a new submission, each as a whole. A step has ``generations``, which share its prompts.
    """
    moved = begun = 0
    for event in of_run:
        if event["event"] == "prompts moved":
            moved += int(event["prompts"])
        elif event["event"] == "begins" and event["name"] == GENERATION:
            begun += 1
    return moved + PROMPTS_PER_STEP * begun // generations - PROMPTS_PER_STEP * steps


def generated_again_after(
    of_run: Sequence[Mapping[str, Any]], since: float, last: int, generations: int
) -> int:
    """Return `generated_again` because of a fault at ``since``, when step ``last`` had ended.

    The events from the end of that step to the end of a later one are counted, however often the run was
    submitted between them.
    """
    ended = [(float(event["time"]), int(event["step"])) for event in of_run if event["event"] == "step"]
    begin = max((time for time, _ in ended if time <= since), default=0.0)
    end, step = next((one for one in ended if one[0] > since and one[1] > last), (math.inf, last))
    within = [event for event in of_run if begin < float(event["time"]) <= end]
    return generated_again(within, step - last, generations)


class Job:
    """A run submitted on the last node; its events are in ``folder``, which is emptied first.

    ``trains`` appears in its output when training begins.
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
        """Whether the submitting command has ended."""
        return self._code.done()

    @property
    def refused(self) -> bool:
        """Whether the job was refused because it does not fit; waits until that is known."""
        self.wait_until(lambda: bool(self._submitted), REACH_SECONDS)
        return not self._submitted

    @property
    def _submitted(self) -> list[str]:
        """The id of each job, once it is printed."""
        return [found[1] for line in tuple(self.printed) if (found := SUBMITTED.fullmatch(line))]

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events of one kind so far."""
        return [event for event in self.all_events() if event["event"] == name]

    def all_events(self) -> list[dict[str, Any]]:
        """Return all events so far, oldest first."""
        return events.read(self._folder)

    @property
    def submissions(self) -> int:
        """How often the run was submitted."""
        return len(self._submitted)

    def steps(self, since: float = 0.0) -> list[int]:
        """Return the numbers of the steps that ended after ``since``, in unix seconds."""
        return [int(event["step"]) for event in self.events("step") if event["time"] > since]

    def rewards(self, since: float = 0.0) -> dict[int, float]:
        """Return the reward of each step that ended after ``since``."""
        return {int(one["step"]): one["reward"] for one in self.events("step") if one["time"] > since}

    def wait_until(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Wait until ``holds``; return False if the job ends first or after ``seconds``."""
        deadline = time.monotonic() + seconds
        while not holds():
            if self.ended or time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def reach(self, phase: str) -> int:
        """Wait until ``phase`` begins again, and return `other_phases`; `UserError` if it never does."""
        seen = self._count(phase)
        if not self.wait_until(lambda: self._count(phase) > seen, REACH_SECONDS):
            raise UserError(f"the run did not reach {phase}: {demo.cause(self.printed)}")
        return self.other_phases(phase)

    def other_phases(self, phase: str) -> int:
        """Return how many phases other than ``phase`` have begun, plus how many steps have ended.

        ``phase`` itself may begin again while it lasts: each rank of OpenRLHF 0.5 has its own generation.
        """
        others = (other for other in (GENERATION, SYNC, TRAINING) if other != phase)
        return sum(map(self._count, others)) + len(self.steps())

    def first_step(self) -> int:
        """Return the number of this run's first step; `UserError` if it completes none."""
        if not self.wait_until(lambda: bool(self.steps()), REACH_SECONDS):
            raise UserError(f"no step was completed: {demo.cause(self.printed)}")
        return self.steps()[0]

    def address(self, phase: str) -> str:
        """Return the node that a fault in ``phase`` hits: that of the trainer's last rank or of the engine.

        Waits for their placement, and for the first step unless ``phase`` is the start.
        """
        if not self.wait_until(lambda: bool(self.events("placement")), REACH_SECONDS):
            raise UserError(f"nothing was placed: {demo.cause(self.printed)}")
        if phase != START:
            self.first_step()
        return self.ranks[-1] if phase == TRAINING else str(self._placed["engines"][0][0])

    @property
    def ranks(self) -> list[str]:
        """The addresses of the trainer's ranks."""
        return [str(address) for address in self._placed["groups"]["actor"]]

    def outcome(self, repair: Callable[[], None]) -> tuple[Outcome, float, bool]:
        """Return the outcome of the job from now on, the seconds until it is known, and whether of a repair.

        ``repair`` removes the fault; it is called if the job does not go on for `LASTS_SECONDS`.
        """
        begun, since = time.monotonic(), time.time()

        def goes_on() -> bool:
            return len(self.steps(since)) >= STEPS_TO_GO_ON

        is_repaired = not self.wait_until(goes_on, LASTS_SECONDS) and not self.ended
        if is_repaired:
            repair()
            self.wait_until(goes_on, HANG_SECONDS)
        if self.ended:
            return "ended", max(0.0, self.ended_at - begun), is_repaired
        return "goes on" if goes_on() else "hangs", time.monotonic() - begun, is_repaired

    def error(self, after: int, nodes: Collection[str]) -> tuple[str, bool]:
        """Return the line with the error, and whether it names one of ``nodes``.

        The first ``after`` lines are ignored. Ray prints the reason of an actor's death in a separate line.
        """
        lines = [COLOUR.sub("", line).strip() for line in self.printed[after:]]
        why = [line for line in lines if line.startswith(WHY_DEAD)]
        error = demo.cause(lines) + (f" ... {why[-1]}" if why else "")
        return error, names_one(error, nodes)

    def stop(self) -> None:
        """Stop the job if it runs, and wait until it has ended."""
        if not self.ended:
            stop = ["ray", "job", "stop", "--address", demo.DASHBOARD, self._submitted[-1]]
            self._cluster.output(self._cluster.head, stop)
            self.wait_until(lambda: False, STOP_SECONDS)

    @property
    def _placed(self) -> Mapping[str, Any]:
        return run_placement(self.events("placement"))

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
            return self._cluster.follow(
                command, self._print, timeout=TEST_SECONDS, nodes_may_end=True, container=desk
            )
        finally:
            self.ended_at = time.monotonic()


def saved_step(cluster: Cluster) -> int:
    """Return the step of the last checkpoint, 0 without one."""
    latest = cluster.output(
        cluster.head, ["sh", "-c", f"cat {CHECKPOINTS}/_actor/latest 2>/dev/null || true"]
    )
    return int(latest.strip().removeprefix("global_step") or 0)


def left_behind(cluster: Cluster) -> list[str]:
    """Return what ended runs have left, after up to `LEFT_SECONDS` in which it may disappear."""
    deadline = time.monotonic() + LEFT_SECONDS
    while (found := _left(cluster)) and time.monotonic() < deadline:
        time.sleep(1.0)
    return found


def end(cluster: Cluster) -> None:
    """End what is left, as a user would, before the next run; `UserError` if anything remains."""
    for container in cluster.containers:
        cluster.output(container, [*REAP, "--yes"])
    if found := left_behind(cluster):  # Ray detects ended processes with a delay
        raise UserError(f"rlhf-stack reap --yes did not end {'; '.join(found)}")


def _left(cluster: Cluster) -> list[str]:
    found: list[str] = json.loads(cluster.output(cluster.head, ["python", "-c", RESERVED]).splitlines()[-1])
    list_left = ["sh", "-c", f"{' '.join(REAP)} --json || test $? = 1"]
    for container in cluster.containers:
        report = json.loads(cluster.output(container, list_left))
        found += [f"{one['kind']} {one['what']}" for one in report["left"]]
    return found
