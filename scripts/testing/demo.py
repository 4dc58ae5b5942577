"""Train with the real stack on two nodes, without a GPU.

``python -m scripts.testing.demo [CELL]``: builds the cell, starts two containers as two Ray nodes with their own
addresses, and submits OpenRLHF's own ``train_ppo_ray`` to them. Ends with a report, also in
``build/demo/CELL/report.json``. With another layout, number of steps or seed than its own it is no test of
the image, and leaves no record of one.
"""

import argparse
import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from scripts.docker.client import connect, with_docker_errors
from scripts.errors import UserError, run
from scripts.images import image_build
from scripts.locking import turn
from scripts.matrix.load import Cell, find, load
from scripts.paths import ROOT
from scripts.testing import demo_report, records
from scripts.testing.cluster import Cluster, Node

OUT = ROOT / "build" / "demo"
EVENTS = "/tmp/rlhf-stack/events"  # noqa: S108  (inside the containers)
DATA = "/tmp/rlhf-stack/demo"  # noqa: S108  (inside the containers)
NODES = (Node("head", gpus=2), Node("worker", gpus=2))
ENVIRONMENT = {
    "RLHF_STACK_EVENTS": EVENTS,
    "RLHF_STACK_VERIFY_SYNC": "1",
    "RLHF_STACK_REPEATABLE": "1",
    "HF_HUB_OFFLINE": "1",
}
DASHBOARD = "http://127.0.0.1:8265"  # on the node itself
SUBMIT = ("ray", "job", "submit", "--address", DASHBOARD)
KEPT_LINES = 1000
OF_THE_TEST = ("layout", "steps", "seed")  # options that the test of an image leaves as they are


class Display:
    """Progress as a bar on a terminal, elsewhere as lines; and the seconds of each phase."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.started = time.monotonic()
        self.seconds: dict[str, float] = {}
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True)

    @contextmanager
    def phase(self, name: str, text: str) -> Iterator[None]:
        """Time what happens inside as phase ``name``."""
        self.console.print(f"[bold]{name}[/bold]: {text}")
        start = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - start

    @contextmanager
    def bar(self, total: int) -> Iterator["Bar"]:
        """A bar of ``total`` training steps."""
        with self._progress:
            yield Bar(self._progress, total, self.console)


class Bar:
    """How far training is."""

    def __init__(self, progress: Progress, total: int, console: Console) -> None:
        self._progress = progress
        self._total = total
        self._console = console
        self._task = progress.add_task("starting engines and trainers", total=total)
        self._done = 0

    def update(self, events: list[dict[str, Any]]) -> None:
        """Show what ``events`` (all so far) say."""
        phases = {event["name"] for event in events if event["event"] == "phase"}
        rewards = [float(event["reward"]) for event in events if event["event"] == "step"]
        text = "training" if "models up" in phases else "starting engines and trainers"
        if rewards:
            text = f"step {len(rewards)}/{self._total}, reward {rewards[-1]:.2f} {demo_report.sparkline(rewards)}"
        self._progress.update(self._task, description=text, completed=len(rewards))
        if not self._console.is_terminal:
            for number in range(self._done, len(rewards)):
                self._console.print(f"  step {number + 1}/{self._total}: reward {rewards[number]:.3f}")
        self._done = len(rewards)


class JobLog:
    """The job's output, kept in a file, its end in memory."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("w", encoding="utf-8")
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)

    def write(self, line: str) -> None:
        """Take one line."""
        self._file.write(line + "\n")
        self._file.flush()
        self.lines.append(line)

    def cause(self) -> str:
        """`cause` of the lines that are in memory."""
        return cause(self.lines)


def folder(cell: Cell) -> Path:
    """Where the demo of a cell keeps its report and logs."""
    return OUT / cell.id


def cause(lines: Sequence[str]) -> str:
    """The line of a job's output that most likely says why it failed: the last exception."""
    errors = [
        line.strip() for line in lines if "Error:" in line or "Exception:" in line or "Mismatch:" in line
    ]
    return errors[-1] if errors else (lines[-1].strip() if lines else "it printed nothing")


def events_of(cluster: Cluster) -> list[dict[str, Any]]:
    """All events of the run so far, oldest first; a line that is still being written is left out."""
    command = ["sh", "-c", f"cat {EVENTS}/*.jsonl 2>/dev/null || true"]
    texts = [cluster.output(container, command) for container in cluster.containers]
    lines = [line for text in texts for line in text.split("\n")[:-1]]
    return sorted((json.loads(line) for line in lines), key=lambda event: float(event["time"]))


def prepare(cluster: Cluster, steps: int, seed: int) -> None:
    """Make model, tokenizer and prompts on every node; a `UserError` if nodes made different ones."""
    make = f"python -m rlhf_stack.demo.tiny_model --out {DATA} --seed {seed} --steps {steps}"
    digest = f"find {DATA} -type f | sort | xargs sha256sum"
    with ThreadPoolExecutor() as pool:
        made = set(
            pool.map(
                lambda node: cluster.output(node, ["sh", "-c", f"{make} >&2 && {digest}"]), cluster.containers
            )
        )
    if len(made) != 1:
        raise UserError(f"the nodes made different models from seed {seed}")


def command(cluster: Cluster, layout: str, steps: int, seed: int) -> list[str]:
    """The command that trains, as the image's own rlhf_stack gives it."""
    code = (
        "import json, pathlib, rlhf_stack.demo.tiny_run as run; "
        f"print(json.dumps(run.train_arguments({layout!r}, pathlib.Path({DATA!r}), {steps}, {seed})))"
    )
    arguments: list[str] = json.loads(cluster.output(cluster.head, ["python", "-c", code]))
    return ["python", "-m", "openrlhf.cli.train_ppo_ray", *arguments]


def train(
    cluster: Cluster, job: list[str], steps: int, display: Display, timeout: float, out: Path
) -> list[dict[str, Any]]:
    """Submit the job, follow it, and return its events; a `UserError` says why it failed."""
    log = JobLog(out / "job.log")
    submit = [*SUBMIT, "--", *job]
    with display.bar(steps) as bar:
        code = cluster.follow(submit, log.write, lambda: bar.update(events_of(cluster)), timeout)
    if code:
        raise UserError(f"training failed: {log.cause()} (all of it: {log.path.relative_to(ROOT)})")
    return events_of(cluster)


def by_phase(events: list[dict[str, Any]], submitted: float) -> dict[str, float]:
    """Seconds until engines and trainers were up, and of training, from the events."""
    times = {event["name"]: float(event["time"]) for event in events if event["event"] == "phase"}
    up, end = times.get("models up", submitted), times.get("trained", submitted)
    return {"engines": up - submitted, "training": end - up}


def demo(
    cell: Cell, image: str, layout: str, steps: int, seed: int, timeout: float, display: Display
) -> dict[str, Any]:
    """Train with the image on two nodes; returns the report."""
    with ExitStack() as stack:
        with display.phase("nodes", f"{len(NODES)} containers join as Ray nodes"):
            cluster = stack.enter_context(Cluster(connect(), image, NODES, ENVIRONMENT))
        for node in cluster.addresses:
            display.console.print(f"  {node['host']}: {node['address']}, {node['gpus']:g} fake GPUs")
        with display.phase("data", "a tiny model, its tokenizer, prompts and a rule-based reward"):
            prepare(cluster, steps, seed)
            job = command(cluster, layout, steps, seed)
        display.console.print("[bold]job[/bold]: ray job submit -- python -m openrlhf.cli.train_ppo_ray")
        submitted = time.time()
        try:
            events = train(cluster, job, steps, display, timeout, folder(cell))
        finally:
            save_logs(cluster, folder(cell))
        total = time.monotonic() - display.started
        seconds = {**display.seconds, **by_phase(events, submitted), "total": total}
        return demo_report.build(cell.id, cell.versions, cluster.addresses, events, seconds)


def save_logs(cluster: Cluster, out: Path) -> None:
    """Keep what each node printed beside the report."""
    for name, text in cluster.logs().items():
        (out / f"{name}.log").write_text(text, encoding="utf-8")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.testing.demo", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("cell", nargs="?", help="a cell id; the default cell if none is given")
    parser.add_argument(
        "--layout",
        default="separate",
        help="separate: trainer and engines apart; which others there are, the image knows (hybrid, spread)",
    )
    parser.add_argument("--steps", type=int, default=28, help="optimiser steps (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--timeout", type=float, default=1800.0, metavar="SECONDS", help="for the job (%(default)s)"
    )
    options = parser.parse_args()
    if options.steps < 1:
        raise UserError(f"--steps {options.steps}: expected at least 1")
    matrix = load()
    cell = find(matrix, options.cell or matrix.default)
    if cell.accelerator.kind != "cpu":
        raise UserError(f"{cell.id} needs GPUs; the demo runs on the cpu cells")
    console = Console()
    with turn(folder(cell), "a demo"):
        display = Display(console)
        with display.phase("build", f"{cell.tag}, cached layers are used"):
            image = image_build.build(cell)
        is_a_test = all(getattr(options, name) == parser.get_default(name) for name in OF_THE_TEST)
        keep = records.kept(cell.id, image, "demo") if is_a_test else nullcontext(records.Tally())
        with keep as tally:
            result = demo(cell, image, options.layout, options.steps, options.seed, options.timeout, display)
            tally.passed, tally.failed = (1, 0) if result["weights_equal"] else (0, 1)
        path = folder(cell) / "report.json"
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    demo_report.show(result, console)
    console.print(f"report: {path.relative_to(ROOT)}")
    if not result["weights_equal"]:
        raise UserError("trainer and engines do not hold the same weights after the last sync")
    return 0


if __name__ == "__main__":
    run(with_docker_errors(main))
