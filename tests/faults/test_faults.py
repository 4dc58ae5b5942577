"""A fault in each phase of a run: it ends with an error or continues, leaves nothing, and can resume."""

import time
from pathlib import Path

import docker
import msgspec
import pytest
from docker.models.images import Image

from scripts.errors import UserError
from scripts.git import revision
from scripts.matrix.load import Cell
from scripts.release import fault_cases
from scripts.release.fault_cases import TRAINING, Case
from scripts.testing import demo, records
from scripts.testing.cluster import Cluster
from tests.faults.injecting import FAULTS, Site, by_address, rejoin
from tests.faults.runs import run_of
from tests.faults.trial import STEPS, Job, end, left_behind

REFUSED_SECONDS = 120.0
ERROR_LENGTH = 220  # characters of an error in the table


class Trial:
    """The runs that one fault hits, sequentially; each resumes the previous one."""

    def __init__(self, cluster: Cluster, folder: Path, fault: str, cell: Cell, image: str) -> None:
        self._cluster, self._folder, self._fault = cluster, folder, fault
        self._cell, self._image = cell.id, image
        self._run = run_of(cell)
        demo.prepare(cluster, STEPS, seed=0)
        self._command = [*demo.command(cluster, self._run.layout, STEPS, seed=0), *self._run.arguments]
        self._runs = 0
        self.cases: list[Case] = []

    def submit(self) -> Job:
        """Submit the run, which resumes from its last checkpoint; repeat if Ray detects a dead node late."""
        deadline = time.monotonic() + REFUSED_SECONDS
        while (job := self._submit()).refused and time.monotonic() < deadline:
            rejoin(self._cluster)
        return job

    def _submit(self) -> Job:
        self._runs += 1
        name = f"{'-'.join(self._fault.replace('/', ' ').split())}-{self._runs}"
        log = self._folder.parent / f"{name}.log"
        return Job(self._cluster, self._command, self._run.trains, self._folder, log)

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
            fault.inject(site)
            in_time = job.other_phases(phase) == before
        outcome, seconds = job.outcome()
        fault.remove(site)
        error, named, left = "", False, []
        if outcome != "goes on":
            error, named = job.error(printed, fault.expected_nodes(site))
            rejoin(self._cluster)
            job.stop()
            left = self._left()
        case = Case(
            cell=self._cell,
            image=self._image,
            revision=revision(),
            when=records.now(),
            fault=self._fault,
            phase=phase,
            in_time=in_time,
            outcome=outcome,
            seconds=round(seconds, 1),
            said=error[:ERROR_LENGTH],
            node_named=named,
            left=tuple(left),
        )
        self.cases.append(case)
        fault_cases.write(case)
        if left:
            end(self._cluster)
        return outcome == "goes on"

    def _left(self) -> list[str]:
        """Return the resources that are left; a node that Ray declared dead may end meanwhile."""
        try:
            return left_behind(self._cluster)
        except UserError:
            rejoin(self._cluster)
            return left_behind(self._cluster)

    def record_afterwards(self, afterwards: str) -> None:
        """Record what the same command did after the last case."""
        self.cases[-1] = msgspec.structs.replace(self.cases[-1], afterwards=afterwards)
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


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fault", fault_cases.FAULTS)
def test_a_run_ends_with_an_error_or_continues_after_a_fault(
    client: docker.DockerClient, cluster: Cluster, folder: Path, cell: Cell, image: Image, fault: str
) -> None:
    """The run does not hang, leaves nothing, and the next run resumes from the last checkpoint."""
    del client
    trial = Trial(cluster, folder, fault, cell, str(image.id))
    job = trial.submit()
    for phase in fault_cases.FAULTS[fault]:
        if trial.hit(job, phase):
            trial.record_afterwards("is not needed")
            continue
        job = trial.submit()
        trial.check_resumed(job)
    job.stop()
    assert [case.phase for case in trial.cases if case.outcome == "hangs"] == []
    assert {case.phase: case.left for case in trial.cases if case.left} == {}
