"""A fault in each phase of a run: it ends with an error or goes on, leaves nothing, and can be resumed."""

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
SAID = 220  # characters of an error that the table shows


class Trial:
    """The runs that one fault hits, one after the other, each of which resumes the one before."""

    def __init__(self, cluster: Cluster, folder: Path, fault: str, cell: Cell, image: str) -> None:
        self._cluster, self._folder, self._fault = cluster, folder, fault
        self._cell, self._image = cell.id, image
        self._run = run_of(cell)
        demo.prepare(cluster, STEPS, seed=0)
        self._command = [*demo.command(cluster, self._run.layout, STEPS, seed=0), *self._run.arguments]
        self._runs = 0
        self.cases: list[Case] = []

    def submit(self) -> Job:
        """The run, from its last checkpoint on; again if it is refused: Ray may find a node dead only now."""
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
        """Hit ``job`` in ``phase``, and say whether it goes on."""
        fault = FAULTS[self._fault]
        address = job.address(phase)
        node = next(node for node, known in by_address(self._cluster) if known == address)
        process = self._run.trainer if phase == TRAINING else self._run.engine
        site = Site(self._cluster, phase, node, address, job.ranks, process)
        with site.stretched():
            beyond = job.reach(phase)
            printed = len(job.printed)
            if job.ended:
                raise UserError(f"the run ended by itself before the fault: {demo.cause(job.printed)}")
            fault.inject(site)
            in_time = job.beyond(phase) == beyond
        outcome, seconds = job.outcome()
        fault.mend(site)
        said, named, left = "", False, []
        if outcome != "goes on":
            said, named = job.said(printed, fault.blamed(site))
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
            said=said[:SAID],
            node_named=named,
            left=tuple(left),
        )
        self.cases.append(case)
        fault_cases.write(case)
        if left:
            end(self._cluster)
        return outcome == "goes on"

    def _left(self) -> list[str]:
        """What is left behind; a node may end meanwhile, as Ray ends one that it took for dead."""
        try:
            return left_behind(self._cluster)
        except UserError:
            rejoin(self._cluster)
            return left_behind(self._cluster)

    def tell(self, afterwards: str) -> None:
        """Note what became of the last case afterwards."""
        self.cases[-1] = msgspec.structs.replace(self.cases[-1], afterwards=afterwards)
        fault_cases.write(self.cases[-1])

    def see_it_resumed(self, job: Job) -> None:
        """Until ``job`` does its first step; noted if a case came before."""
        try:
            step = job.first_step()
        except UserError as problem:
            self.tell(f"fails: {problem}"[:SAID])
            raise
        assert step == job.begins_after + 1
        self.tell(f"resumes at step {step}" if job.begins_after else "starts from step 1")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fault", fault_cases.FAULTS)
def test_a_run_that_is_hit_ends_or_goes_on(
    client: docker.DockerClient, cluster: Cluster, folder: Path, cell: Cell, image: Image, fault: str
) -> None:
    """No silent hang, nothing left behind, and the next run goes on from the last checkpoint."""
    del client
    trial = Trial(cluster, folder, fault, cell, str(image.id))
    job = trial.submit()
    for phase in fault_cases.FAULTS[fault]:
        if trial.hit(job, phase):
            trial.tell("is not needed")
            continue
        job = trial.submit()
        trial.see_it_resumed(job)
    job.stop()
    assert [case.phase for case in trial.cases if case.outcome == "hangs"] == []
    assert {case.phase: case.left for case in trial.cases if case.left} == {}
