"""A run under faults: it ends by itself, with the weights of the undisturbed run, and leaves nothing.

``PYTHONPATH=images/runtime python -m tests.bench.soak [--steps 200] [--seed 1]``, as root.
Six containers of the cell are nodes: a head, four with a fake GPU (the trainer, two engines, a spare one),
and one that submits the run.
First nothing is disturbed, then a random fault hits a random node every 30 to 90 s; the sequence follows from
the seed. A node that was killed is started again by its machine, as a service manager would. No human acts.
The undisturbed run is run once for an image, its steps and settings. The report, a JSON file, and a plot of
steps and faults over time are in a folder of each run below ``build/soak``, from which ``python -m scripts
soaks`` adds them to the catalogue.
"""

import hashlib
import os
import random
import re
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from matplotlib.figure import Figure
from rlhf_stack.telemetry import events

from scripts.digests import sha256
from scripts.docker.client import connect, with_docker_errors
from scripts.errors import UserError, run
from scripts.git import revision
from scripts.matrix.load import Cell, find, load
from scripts.release import soaks
from scripts.release.soaks import Fault, Soak
from scripts.testing import demo, records
from scripts.testing.cluster import Cluster, ContainerNode
from scripts.testing.in_image import local_image
from tests.bench.results import Row, parser, show
from tests.faults.injecting import Site, by_address, cut_link, pause, processes, restore_link
from tests.faults.once import once
from tests.faults.runs import CHECKPOINTS, RUNS, run_of
from tests.faults.trial import EVENTS, generated_again, left_behind
from tests.network import links, remote

NODES = (
    ContainerNode("head", gpus=0),
    *(ContainerNode(name, gpus=1) for name in ("one", "two", "three", "four")),
    ContainerNode("desk", gpus=0, cpus=0),
)
LAYOUT = (
    *("--actor.num_nodes", "1", "--actor.num_gpus_per_node", "1"),
    *("--vllm.num_engines", "2", "--vllm.tensor_parallel_size", "1"),
    *("--rollout.max_new_tokens", "100", "--actor.adam.lr", "1e-3"),  # it still learns after 200 steps
)
ENVIRONMENT = {
    "RLHF_STACK_EVENTS": EVENTS,
    "RLHF_STACK_ENGINE_RESTARTS": "100",
    "RLHF_STACK_SYNC_TIMEOUT": "20",
    "RLHF_STACK_ENGINE_TIMEOUT": "300",
    "RLHF_STACK_REPEATABLE": "1",
    "HF_HUB_OFFLINE": "1",
}
JOB = r"rlhf-stack: job (\w+)"
SUBMIT = ("rlhf-stack", "submit", "--address", remote.SERVER, "--restarts", "100", "--node-wait", "120", "--")
BETWEEN = (30.0, 90.0)
LASTS = (10.0, 90.0)  # a node that is paused or cut off; Ray finds it dead after about a minute
DOWN = (5.0, 30.0)  # a node that was killed, until its machine has started it again
ENGINE, TRAINER = "VLLM::EngineCore", "ray::PolicyModelActor"
# The kinds of faults, by how often they occur: most of a large cluster's are lost processes of engines.
KINDS = {"engine killed": 5, "node killed": 2, "node paused": 2, "link cut": 2, "trainer killed": 1}
MOST_HOURS = 12
POLL = 2.0


@dataclass
class Run:
    """A run: its steps (number, seconds after its beginning), rewards by step, and digest of its weights.

    ``again`` is the number of prompts that were generated again.
    """

    when: datetime
    code: int = -1
    seconds: float = 0.0
    submissions: int = 1
    steps: list[tuple[int, float]] = field(default_factory=list)
    rewards: dict[int, float] = field(default_factory=dict)
    weights: str = ""
    recoveries: list[float] = field(default_factory=list)
    again: int = 0
    faults: list[Fault] = field(default_factory=list)


class Disturber(threading.Thread):
    """Injects faults into the nodes of ``cluster`` until it is stopped."""

    def __init__(self, cluster: Cluster, seed: int, began: float, found: list[Fault]) -> None:
        super().__init__(daemon=True)
        self._cluster, self._began, self._found = cluster, began, found
        self._addresses = by_address(cluster)
        self._random = random.Random(seed)  # noqa: S311
        self._end = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Inject a fault after each pause."""
        try:
            while not self._wait(self._random.uniform(*BETWEEN)):
                kinds = self._random.choices(list(KINDS), weights=list(KINDS.values()))
                self._inject(kinds[0], self._random.randrange(1, len(NODES) - 1))
        except BaseException as error:  # raised by `stop`
            print(f"  {self._now():5.0f} s: no more faults: {error}", file=sys.stderr, flush=True)
            self.error = error

    def stop(self) -> None:
        """Stop, and undo the fault that lasts; raise the error of an injection that failed."""
        self._end.set()
        self.join()
        if self.error:
            raise self.error

    def _inject(self, kind: str, number: int) -> None:
        lasts, down = self._random.uniform(*LASTS), self._random.uniform(*DOWN)
        nodes = self._cluster.containers[1:-1]
        prefix = {"engine killed": ENGINE, "trainer killed": TRAINER}.get(kind, "")
        if prefix and not (nodes := [node for node in nodes if processes(node, prefix)]):
            return  # the run is starting
        node = nodes[number % len(nodes)]
        fault = Fault(kind, NODES[self._cluster.containers.index(node)].name, round(self._now(), 1), 0.0)
        self._found.append(fault)
        print(f"  {fault.began:5.0f} s: {kind} on {fault.node}", file=sys.stderr, flush=True)
        if prefix:
            for pid in processes(node, prefix):
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, signal.SIGKILL)
        elif kind == "node killed":
            node.kill()
            self._end.wait(down)
            node.start()
        elif kind == "node paused":
            pause(node)
            self._wait(lasts)
            node.unpause()
        else:
            site = Site(self._cluster, "", node, dict(self._addresses)[node], (), "")
            cut_link(site)
            self._wait(lasts)
            restore_link(site)
        self._found[-1] = msgspec.structs.replace(fault, seconds=round(self._now() - fault.began, 1))

    def _wait(self, seconds: float) -> bool:
        """Wait, and meanwhile start nodes that end: Ray ends one that it had declared dead. True: stop."""
        until = time.monotonic() + seconds
        while not self._end.wait(min(POLL, max(0.0, until - time.monotonic()))):
            for container in self._cluster.containers:
                container.reload()
                if container.status == "exited":
                    container.start()
            if time.monotonic() >= until:
                return False
        return True

    def _now(self) -> float:
        return time.monotonic() - self._began


def train(cluster: Cluster, cell: Cell, folder: Path, log_file: Path, steps: int, seed: int | None) -> Run:
    """Run ``steps`` steps, disturbed by the faults of ``seed``; ``folder`` has the events and the models."""
    name = log_file.stem
    for file in (folder / "events").glob("*.jsonl"):
        file.unlink()
    saved = f"{CHECKPOINTS}/{name}"
    command = [
        *demo.command(cluster, "separate", steps, seed=0),
        *run_of(cell).arguments,
        *LAYOUT,
        *("--ckpt.path", saved, "--ckpt.output_dir", f"{saved}/trained", "--ckpt.max_num", "2"),
    ]
    found, began, at = Run(records.now()), time.monotonic(), time.time()
    log = demo.JobLog(log_file)
    disturber = Disturber(cluster, seed, began, found.faults) if seed is not None else None
    if disturber:
        disturber.start()
    try:
        found.code = cluster.follow(
            [*SUBMIT, *command],
            log.write,
            timeout=MOST_HOURS * 3600,
            nodes_may_end=True,
            container=cluster.containers[-1],
        )
    finally:
        if disturber:
            disturber.stop()
    found.seconds = time.monotonic() - began
    of_run = events.read(folder / "events")
    for event in of_run:
        if event["event"] == "step":
            found.steps.append((int(event["step"]), event["time"] - at))
            found.rewards[int(event["step"])] = event["reward"]
        elif event["event"] == "engine restored":
            found.recoveries.append(round(float(event["seconds"]), 1))
    found.again = generated_again(of_run, len(found.rewards), run_of(cell).generations)
    found.submissions = len(set(re.findall(JOB, log.path.read_text(encoding="utf-8"))))
    found.weights = digest(folder / "checkpoints" / name / "trained")
    return found


def digest(trained: Path) -> str:
    """Return the SHA-256 of a trained model's weights, "" without any."""
    files = sorted(trained.glob("*.safetensors"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest() if files else ""


def plot(file: Path, undisturbed: Run, disturbed: Run, title: str) -> None:
    """Plot the steps of both runs over time, and the faults as bars below."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    figure.suptitle(title)
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    for label, one in (("undisturbed", undisturbed), ("under faults", disturbed)):
        above.plot([0, *(when for _, when in one.steps)], [0, *(step for step, _ in one.steps)], label=label)
    above.set_ylabel("step")
    above.legend()
    kinds = list(KINDS)
    for fault in disturbed.faults:
        below.barh(kinds.index(fault.kind), max(2.0, fault.seconds), left=fault.began, color="tab:red")
    below.set_yticks(range(len(kinds)), kinds)
    below.set_xlabel("seconds")
    figure.savefig(file, dpi=100)


def chosen_cell(name: str | None) -> Cell:
    """Return a cell, by default the default one; `UserError` if its OpenRLHF lacks the flags of `LAYOUT`."""
    matrix = load()
    cell = find(matrix, name or matrix.default)
    if cell.accelerator.kind != "cpu" or run_of(cell) is not RUNS["0.11"]:
        raise UserError(
            f"--cell {cell.id}: this run has flags of OpenRLHF 0.11 and no GPUs: choose a CPU cell with it"
        )
    return cell


def undisturbed_run(cluster: Cluster, cell: Cell, folder: Path, image: str, steps: int) -> Run:
    """Return the undisturbed run of ``steps`` steps of this image and these settings, which is run once."""
    settings = [image, steps, run_of(cell).arguments, LAYOUT, ENVIRONMENT]
    key = sha256(msgspec.json.encode(settings))[: records.DIGITS]
    kept = soaks.REPORTS / cell.id / f"undisturbed-{key}"

    def compute() -> Run:
        log = kept / "undisturbed.log"
        found = train(cluster, cell, folder, log, steps, None)
        if found.code:
            raise UserError(f"the undisturbed run ended with exit code {found.code}: {log}")
        return found

    found = once(kept, Run, compute, "an undisturbed run")
    print(f"the undisturbed run is of {found.when:%Y-%m-%d %H:%M} UTC: {kept}", file=sys.stderr, flush=True)
    return found


def soak(cell: Cell, steps: int, seed: int, out: Path | None) -> Soak:
    """Run under the faults of ``seed``, next to the undisturbed run; write and return the report.

    It is in ``out``, by default in a new folder of the cell below `soaks.REPORTS`.
    """
    if reason := links.obstacle():
        raise UserError(reason)
    client, commit, tests, when = connect(), revision(), soaks.tests(), records.now()
    out = out or soaks.REPORTS / cell.id / f"seed-{seed}-{steps}-steps-{when:%Y%m%dT%H%M%S}"
    with TemporaryDirectory(prefix="soak-") as temporary:
        folder = Path(temporary)
        mounts = {}
        for name, path in (("events", EVENTS), ("checkpoints", CHECKPOINTS)):
            (folder / name).mkdir()
            (folder / name).chmod(0o777)  # the containers' user has another uid
            mounts[str(folder / name)] = {"bind": path, "mode": "rw"}
        options = {"volumes": mounts}
        subject = records.subject(cell, client.images.get(local_image(client, cell)))
        with Cluster(
            client, subject.image, NODES, ENVIRONMENT, options=options, start=remote.reachable
        ) as nodes:
            demo.prepare(nodes, steps, seed=0)
            undisturbed = undisturbed_run(nodes, cell, folder, subject.image, steps)
            disturbed = train(nodes, cell, folder, out / "disturbed.log", steps, seed)
            left = left_behind(nodes)
    report = Soak(
        cell=subject.cell,
        image=subject.image,
        inputs=subject.inputs,
        tests=tests,
        revision=commit,
        when=disturbed.when,
        undisturbed_when=undisturbed.when,
        steps=steps,
        seed=seed,
        ended=disturbed.code,
        seconds=(round(disturbed.seconds, 1), round(undisturbed.seconds, 1)),
        same_rewards=undisturbed.rewards == disturbed.rewards,
        same_weights=bool(disturbed.weights) and undisturbed.weights == disturbed.weights,
        left=tuple(left),
        submissions=disturbed.submissions,
        steps_repeated=len(disturbed.steps) - len(disturbed.rewards),
        prompts_again=disturbed.again,
        recoveries=tuple(disturbed.recoveries),
        faults=tuple(disturbed.faults),
    )
    (out / soaks.REPORT).write_bytes(records.encode(report))
    plot(out / soaks.TIMELINE, undisturbed, disturbed, f"{report.cell}, seed {seed}: {report.time}")
    return report


def main() -> int:
    """Print the report; 1 if the run did not end as the undisturbed one, however long it took."""
    options = parser("soak", __doc__)
    options.add_argument("--steps", type=int, default=200, help="steps of each run")
    options.add_argument("--seed", type=int, default=1, help="of the sequence of faults")
    options.add_argument(
        "--out", type=Path, help="folder of the report [a new one of each run below build/soak]"
    )
    chosen = options.parse_args()
    if chosen.steps < 1:
        raise UserError("--steps: expected a number greater than 0")
    cell = chosen_cell(chosen.cell)
    report = with_docker_errors(lambda: soak(cell, chosen.steps, chosen.seed, chosen.out))()
    after, before = report.seconds
    rows = [
        Row(f"{report.steps} steps", "s", after, before),
        Row("faults", "", len(report.faults)),
        Row("submissions", "", report.submissions),
        Row("steps repeated", "", report.steps_repeated),
        Row("prompts generated again", "", report.prompts_again),
        Row("restarts of engines", "", len(report.recoveries)),
        Row("median restart", "s", report.median_restart),
    ]
    notes = [
        f"as the undisturbed run: {'; '.join(report.failures) or 'yes'}",
        report.time,
    ]
    show(rows, notes, chosen.json, "undisturbed")
    return 1 if report.failures else 0


if __name__ == "__main__":
    run(main)
