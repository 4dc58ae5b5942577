"""A fault in each phase of a run: it ends with an error or continues, leaves nothing, and can resume."""

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scripts.digests import sha256
from scripts.errors import UserError
from scripts.matrix.load import Cell
from scripts.release import fault_cases
from scripts.release.fault_cases import HYBRID, SEPARATE, TRAINING, Case
from scripts.testing import demo, records
from scripts.testing.cluster import Cluster
from tests.faults.injecting import FAULTS, Site, by_address, rejoin
from tests.faults.once import once
from tests.faults.runs import run_of
from tests.faults.trial import (
    ENVIRONMENT,
    REACH_SECONDS,
    STEPS,
    TEST_SECONDS,
    Job,
    end,
    generated_again_after,
    left_behind,
)

REFUSED_SECONDS = 120.0
UNDISTURBED = fault_cases.CASES.with_name("undisturbed")
KNOWN_STEPS, KNOWN_SECONDS = 24, 1200.0  # of the undisturbed run
ERROR_LENGTH = 220  # characters of an error in the table


class Trial:
    """The runs that one fault hits, sequentially; each resumes the previous one."""

    def __init__(
        self, cluster: Cluster, folder: Path, fault: str, layout: str, cell: Cell, tested: dict[str, Any]
    ) -> None:
        self._cluster, self._folder, self._fault, self._layout = cluster, folder, fault, layout
        self._tested = tested
        self._run = run_of(cell)
        layout = HYBRID if layout == HYBRID else self._run.layout
        demo.prepare(cluster, STEPS, seed=0)
        self._command = [*demo.command(cluster, layout, STEPS, seed=0), *self._run.arguments]
        self._runs = self._refused = 0
        self.cases: list[Case] = []
        self._undisturbed = self._rewards_of_the_undisturbed_run()

    def submit(self) -> Job:
        """Submit the run, which resumes from its last checkpoint; repeat if Ray detects a dead node late."""
        deadline = time.monotonic() + REFUSED_SECONDS
        self._refused = 0
        while (job := self._submit()).refused and time.monotonic() < deadline:
            self._refused += 1
            rejoin(self._cluster)
        return job

    def _rewards_of_the_undisturbed_run(self) -> dict[int, float]:
        """Return the reward of each step of a run without faults, which is run once for image and command."""
        key = sha256(msgspec.json.encode([self._tested["image"], self._command, ENVIRONMENT]))
        folder = UNDISTURBED / f"{self._tested['cell']}-{self._layout}-{key[: records.DIGITS]}"
        return once(folder, dict[int, float], self._run_undisturbed, "an undisturbed run")

    def _run_undisturbed(self) -> dict[int, float]:
        job = self._submit(*self._run.keeps_nothing)
        if not job.wait_until(lambda: len(job.steps()) >= KNOWN_STEPS, KNOWN_SECONDS):
            raise UserError(f"the run without faults did not train: {demo.cause(job.printed)}")
        job.stop()
        return job.rewards()

    def _submit(self, *changes: str) -> Job:
        self._runs += 1
        name = f"{'-'.join(self._fault.replace('/', ' ').split())}-{self._runs}"
        log = self._folder.parent / f"{name}.log"
        return Job(self._cluster, [*self._command, *changes], self._run.trains, self._folder, log)

    def hit(self, job: Job, phase: str) -> bool:
        """Inject the fault into ``job`` in ``phase``; return whether the job goes on."""
        fault = FAULTS[self._fault]
        address = job.address(phase)
        node = next(node for node, known in by_address(self._cluster) if known == address)
        process = self._run.trainer if phase == TRAINING else self._run.engine
        site = Site(self._cluster, phase, node, address, job.ranks, process)
        with site.prolonged():
            before = job.reach(phase)
            printed = len(job.printed)
            if job.ended:
                raise UserError(f"the run ended before the fault: {demo.cause(job.printed)}")
            last, submissions, since = (
                max(job.steps(), default=job.begins_after),
                job.submissions,
                time.time(),
            )
            fault.inject(site)
            in_time = job.other_phases(phase) == before

        def repair() -> None:
            fault.remove(site)
            rejoin(self._cluster)

        outcome, seconds, repaired = job.outcome(repair)
        if not repaired:
            fault.remove(site)
        error, named, left = "", False, None
        if outcome != "goes on":
            error, named = job.error(printed, fault.expected_nodes(site))
            rejoin(self._cluster)
            left = self._left_after(job)
        case = Case(
            **self._tested,
            when=records.now(),
            layout=self._layout,
            fault=self._fault,
            phase=phase,
            in_time=in_time,
            outcome=outcome,
            seconds=round(seconds, 1),
            said=error[:ERROR_LENGTH],
            node_named=named,
            left=left,
            repaired=repaired and fault.lasts,
            refused=self._refused,
            **(self._recovery(job, since, last, submissions) if outcome == "goes on" else {}),
        )
        if outcome == "goes on":
            rejoin(self._cluster)
        self.cases.append(case)
        fault_cases.write(case)
        if left:
            end(self._cluster)
        return outcome == "goes on"

    def _recovery(self, job: Job, since: float, last: int, submissions: int) -> dict[str, Any]:
        """Return what a fault at ``since``, after step ``last`` had ended, cost a run that goes on."""
        job.wait_until(lambda: max(job.steps(since)) > last, REACH_SECONDS)
        steps = [event for event in job.events("step") if event["time"] > since]
        rewards = job.rewards(since)
        is_known = rewards.keys() <= self._undisturbed.keys()
        return {
            "after": round(steps[0]["time"] - since, 1),
            "submissions": job.submissions - submissions,
            "steps_lost": max(0, last + 1 - int(steps[0]["step"])),
            "prompts_again": generated_again_after(job.all_events(), since, last, self._run.generations),
            "equal": rewards.items() <= self._undisturbed.items() if is_known else None,
        }

    def _left_after(self, job: Job) -> tuple[str, ...]:
        """End ``job`` and return what it left; a node that Ray declared dead may end meanwhile."""
        job.stop()
        try:
            return tuple(left_behind(self._cluster))
        except UserError:
            rejoin(self._cluster)
            return tuple(left_behind(self._cluster))

    def finish(self, job: Job) -> None:
        """End ``job``, which the last case did not end, and record with that case what it left too."""
        self._record(left=(*(self.cases[-1].left or ()), *self._left_after(job)))

    def record_afterwards(self, afterwards: str) -> None:
        """Record what the same command did after the last case."""
        self._record(afterwards=afterwards)

    def _record(self, **changes: Any) -> None:
        self.cases[-1] = msgspec.structs.replace(self.cases[-1], **changes)
        fault_cases.write(self.cases[-1])

    def check_resumed(self, job: Job) -> None:
        """Wait for the first step of ``job``, check that it resumes from the checkpoint, and record it."""
        try:
            step = job.first_step()
        except UserError as error:
            self.record_afterwards(f"fails: {error}"[:ERROR_LENGTH])
            raise
        assert step == job.begins_after + 1
        self.record_afterwards(f"resumes at step {step}" if job.begins_after else "starts from step 1")


@pytest.mark.timeout(TEST_SECONDS)
@pytest.mark.parametrize("layout", [SEPARATE, HYBRID])
@pytest.mark.parametrize("fault", fault_cases.FAULTS)
def test_a_run_ends_with_an_error_or_continues_after_a_fault(
    cluster: Cluster, folder: Path, cell: Cell, tested: dict[str, Any], fault: str, layout: str
) -> None:
    """The run does not hang, leaves nothing, and the next run resumes from the last checkpoint."""
    if layout not in fault_cases.layouts(cell):
        pytest.skip("this release has no hybrid layout")
    trial = Trial(cluster, folder, fault, layout, cell, tested)
    job = trial.submit()
    for phase in fault_cases.FAULTS[fault]:
        if trial.hit(job, phase):
            trial.record_afterwards("is not needed")
            continue
        job = trial.submit()
        trial.check_resumed(job)
    trial.finish(job)
    assert [case.phase for case in trial.cases if case.outcome == "hangs"] == []
    assert {case.phase: case.left for case in trial.cases if case.left} == {}
    assert [case.phase for case in trial.cases if case.equal is False] == []
    assert [case.said for case in trial.cases if case.outcome == "ended" and not case.node_named] == []
