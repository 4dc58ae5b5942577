"""A run under faults: it ends by itself, with the weights of the undisturbed run, and leaves nothing.

``PYTHONPATH=images/runtime python -m tests.bench.soak [--steps 200] [--seed 1] [--out build/soak]``, as root.
Six containers of the cell are nodes: a head, four with a fake GPU (the trainer, two engines, a spare one),
and one that submits the run.
First nothing is disturbed, then a random fault hits a random node every 30 to 90 s; the sequence follows from
the seed. A node that was killed is started again by its machine, as a service manager would. No human acts.
The report is a JSON file and a plot of steps and faults over time.
"""

import hashlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from matplotlib.figure import Figure
from rlhf_stack.telemetry import events

from scripts.docker.client import connect, with_docker_errors
from scripts.errors import UserError, run
from scripts.git import revision
from scripts.matrix.load import Cell, find, load
from scripts.paths import ROOT
from scripts.testing import demo
from scripts.testing.cluster import Cluster, ContainerNode
from scripts.testing.in_image import local_image
from tests.bench.results import Row, parser, show
from tests.faults.injecting import Site, by_address, cut_link, pause, processes, restore_link
from tests.faults.runs import CHECKPOINTS, run_of
from tests.faults.trial import EVENTS, left_behind
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
SLOWEST = 2.5  # times the undisturbed run, the aim


@dataclass
class Fault:
    """A fault at ``began``, in seconds after the run began; ``seconds`` is how long it lasts."""

    kind: str
    node: str
    began: float
    seconds: float


@dataclass
class Run:
    """A run: its steps (number, seconds after its beginning), rewards by step, and digest of its weights."""

    code: int = -1
    seconds: float = 0.0
    submissions: int = 1
    steps: list[tuple[int, float]] = field(default_factory=list)
    rewards: dict[int, float] = field(default_factory=dict)
    weights: str = ""
    recoveries: list[float] = field(default_factory=list)
    moved: int = 0
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
        fault = Fault(kind, NODES[self._cluster.containers.index(node)].name, self._now(), 0.0)
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
        fault.seconds = self._now() - fault.began

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


def train(cluster: Cluster, cell: Cell, folder: Path, name: str, steps: int, seed: int | None) -> Run:
    """Run ``steps`` steps, disturbed by the faults of ``seed``; ``folder`` has the events and the models."""
    for file in (folder / "events").glob("*.jsonl"):
        file.unlink()
    saved = f"{CHECKPOINTS}/{name}"
    command = [
        *demo.command(cluster, "separate", steps, seed=0),
        *run_of(cell).arguments,
        *LAYOUT,
        *("--ckpt.path", saved, "--ckpt.output_dir", f"{saved}/trained", "--ckpt.max_num", "2"),
    ]
    found, began, at = Run(), time.monotonic(), time.time()
    log = demo.JobLog(folder / f"{name}.log")
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
    for event in events.read(folder / "events"):
        if event["event"] == "step":
            found.steps.append((int(event["step"]), event["time"] - at))
            found.rewards[int(event["step"])] = event["reward"]
        elif event["event"] == "engine restored":
            found.recoveries.append(float(event["seconds"]))
        elif event["event"] == "prompts moved":
            found.moved += int(event["prompts"])
    found.submissions = len(set(re.findall(JOB, log.path.read_text(encoding="utf-8"))))
    found.weights = digest(folder / "checkpoints" / name / "trained")
    return found


def digest(trained: Path) -> str:
    """Return the SHA-256 of a trained model's weights, "" without any."""
    files = sorted(trained.glob("*.safetensors"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest() if files else ""


def plot(file: Path, undisturbed: Run, disturbed: Run) -> None:
    """Plot the steps of both runs over time, and the faults as bars below."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
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


def soak(cell: str | None, steps: int, seed: int, out: Path) -> dict[str, Any]:
    """Run undisturbed, then under the faults of ``seed``; write the report to ``out`` and return it."""
    if reason := links.obstacle():
        raise UserError(reason)
    matrix = load()
    found = find(matrix, cell or matrix.default)
    client = connect()
    with TemporaryDirectory(prefix="soak-") as temporary:
        folder = Path(temporary)
        mounts = {}
        for name, path in (("events", EVENTS), ("checkpoints", CHECKPOINTS)):
            (folder / name).mkdir()
            (folder / name).chmod(0o777)  # the containers' user has another uid
            mounts[str(folder / name)] = {"bind": path, "mode": "rw"}
        options = {"volumes": mounts}
        image = local_image(client, found)
        with Cluster(client, found.tag, NODES, ENVIRONMENT, options=options, start=remote.reachable) as nodes:
            demo.prepare(nodes, steps, seed=0)
            undisturbed = train(nodes, found, folder, "undisturbed", steps, None)
            disturbed = train(nodes, found, folder, "disturbed", steps, seed)
            left = left_behind(nodes)
        out.mkdir(parents=True, exist_ok=True)
        for name in ("undisturbed", "disturbed"):
            shutil.copy(folder / f"{name}.log", out)
    runs = undisturbed, disturbed
    report = {
        "cell": found.id,
        "image": image,
        "revision": revision(),
        "steps": steps,
        "seed": seed,
        "ended": [one.code for one in runs],
        "seconds": [round(one.seconds, 1) for one in runs],
        "same_rewards": undisturbed.rewards == disturbed.rewards,
        "same_weights": bool(disturbed.weights) and undisturbed.weights == disturbed.weights,
        "left": left,
        "submissions": disturbed.submissions,
        "steps_repeated": len(disturbed.steps) - len(disturbed.rewards),
        "prompts_again": disturbed.moved,
        "recoveries": [round(one, 1) for one in disturbed.recoveries],
        "faults": [asdict(one) for one in disturbed.faults],
    }
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    plot(out / "timeline.png", undisturbed, disturbed)
    return report


def main() -> int:
    """Print the report; 1 if the run did not end as the undisturbed one."""
    options = parser("soak", __doc__)
    options.add_argument("--steps", type=int, default=200, help="steps of each run")
    options.add_argument("--seed", type=int, default=1, help="of the sequence of faults")
    options.add_argument("--out", type=Path, default=ROOT / "build" / "soak", help="folder of the report")
    chosen = options.parse_args()
    if chosen.steps < 1:
        raise UserError("--steps: expected a number greater than 0")
    report = with_docker_errors(lambda: soak(chosen.cell, chosen.steps, chosen.seed, chosen.out))()
    before, after = report["seconds"]
    rows = [
        Row(f"{report['steps']} steps", "s", after, before),
        Row("faults", "", len(report["faults"])),
        Row("submissions", "", report["submissions"]),
        Row("steps repeated", "", report["steps_repeated"]),
        Row("prompts generated again", "", report["prompts_again"]),
        Row("restarts of engines", "", len(report["recoveries"])),
        Row("median restart", "s", statistics.median(report["recoveries"] or [0.0])),
    ]
    same = report["same_rewards"] and report["same_weights"]
    notes = [
        f"both runs ended: {report['ended'] == [0, 0]}; rewards and weights are equal: {same}",
        f"left behind: {', '.join(report['left']) or 'nothing'}",
        f"{after / before:.2f} times the undisturbed run (aim: at most {SLOWEST:g})",
    ]
    show(rows, notes, chosen.json, "undisturbed")
    return 0 if report["ended"] == [0, 0] and same and not report["left"] else 1


if __name__ == "__main__":
    run(main)
