"""Train with the real stack on two nodes, without a GPU.

Two containers are started as two Ray nodes with their own addresses, and OpenRLHF's own ``train_ppo_ray`` is
submitted to them. The report is also written to ``build/demo/CELL/report.json``.
"""

import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from scripts.docker.client import connect
from scripts.errors import UserError
from scripts.images.build import build
from scripts.locking import exclusive_lock
from scripts.matrix.load import Cell
from scripts.paths import ROOT
from scripts.testing import credit, demo_report, kept, records
from scripts.testing.cluster import Cluster, ContainerNode

OUT = ROOT / "build" / "demo"
EVENTS = "/tmp/rlhf-stack/events"  # noqa: S108  (inside the containers)
DATA = "/tmp/rlhf-stack/demo"  # noqa: S108  (inside the containers)
NODES = (ContainerNode("head", gpus=2), ContainerNode("worker", gpus=2))
ENVIRONMENT = {
    "RLHF_STACK_EVENTS": EVENTS,
    "RLHF_STACK_VERIFY_SYNC": "1",
    "RLHF_STACK_REPEATABLE": "1",
    "HF_HUB_OFFLINE": "1",
}
DASHBOARD = "http://127.0.0.1:8265"  # on the node itself
SUBMIT = ("ray", "job", "submit", "--address", DASHBOARD)
LOG_LINES = 1000
LAYOUTS = ("separate", "hybrid", "spread")  # of rlhf_stack.demo.tiny_run
MOST_STEPS, MOST_SEED, MOST_SECONDS = 100_000, 2**31 - 1, 2_592_000
LAYOUT, STEPS, SEED, TIMEOUT = "separate", 28, 0, 1800.0


class Display:
    """Progress as a bar on a terminal, otherwise as lines; and the seconds of each phase."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.started = time.monotonic()
        self.seconds: dict[str, float] = {}
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True)

    @contextmanager
    def phase(self, name: str, text: str) -> Iterator[None]:
        """Time the context as phase ``name``."""
        self.console.print(f"[bold]{name}[/bold]: {text}")
        start = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - start

    @contextmanager
    def bar(self, total: int) -> Iterator["Bar"]:
        """A progress bar of ``total`` training steps."""
        with self._progress:
            yield Bar(self._progress, total, self.console)


class Bar:
    """The progress of training."""

    def __init__(self, progress: Progress, total: int, console: Console) -> None:
        self._progress = progress
        self._total = total
        self._console = console
        self._task = progress.add_task("starting engines and trainers", total=total)
        self._done = 0

    def update(self, events: list[dict[str, Any]]) -> None:
        """Show the progress from ``events`` (all so far)."""
        phases = {event["name"] for event in events if event["event"] == "phase"}
        rewards = [float(event["reward"]) for event in events if event["event"] == "step"]
        text = "training" if "models up" in phases else "starting engines and trainers"
        if rewards:
            bars = demo_report.sparkline(rewards)
            text = f"step {len(rewards)}/{self._total}, reward {rewards[-1]:.2f} {bars}"
        self._progress.update(self._task, description=text, completed=len(rewards))
        if not self._console.is_terminal:
            for number in range(self._done, len(rewards)):
                self._console.print(f"  step {number + 1}/{self._total}: reward {rewards[number]:.3f}")
        self._done = len(rewards)


class JobLog:
    """The job's output: all of it in a file, its last lines in memory."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("w", encoding="utf-8")
        self.lines: deque[str] = deque(maxlen=LOG_LINES)

    def write(self, line: str) -> None:
        """Append one line."""
        self._file.write(line + "\n")
        self._file.flush()
        self.lines.append(line)

    def cause(self) -> str:
        """`cause` of the lines in memory."""
        return cause(self.lines)


def folder(cell: Cell) -> Path:
    """The folder of the report and logs of a cell's demo."""
    return OUT / cell.id


def cause(lines: Sequence[str]) -> str:
    """The most likely reason for a job's failure in its output: the last exception."""
    errors = [
        line.strip() for line in lines if "Error:" in line or "Exception:" in line or "Mismatch:" in line
    ]
    return errors[-1] if errors else (lines[-1].strip() if lines else "no output")


def events_of(cluster: Cluster) -> list[dict[str, Any]]:
    """All events of the run so far, oldest first, without a line that is still being written."""
    command = ["sh", "-c", f"cat {EVENTS}/*.jsonl 2>/dev/null || true"]
    texts = [cluster.output(container, command, timeout=300) for container in cluster.containers]
    lines = [line for text in texts for line in text.split("\n")[:-1]]
    return sorted((json.loads(line) for line in lines), key=lambda event: float(event["time"]))


def prepare(cluster: Cluster, steps: int, seed: int) -> None:
    """Create model, tokenizer and prompts on every node; a `UserError` if they differ between nodes."""
    make = f"python -m rlhf_stack.demo.tiny_model --out {DATA} --seed {seed} --steps {steps}"
    digest = f"find {DATA} -type f | sort | xargs sha256sum"
    with ThreadPoolExecutor() as pool:
        digests = set(
            pool.map(
                lambda node: cluster.output(node, ["sh", "-c", f"{make} >&2 && {digest}"]), cluster.containers
            )
        )
    if len(digests) != 1:
        raise UserError(f"the nodes created different models from seed {seed}")


def command(cluster: Cluster, layout: str, steps: int, seed: int) -> list[str]:
    """The training command, with the arguments from the image's own rlhf_stack."""
    code = (
        "import json, pathlib, rlhf_stack.demo.tiny_run as run; "
        f"print(json.dumps(run.train_arguments({layout!r}, pathlib.Path({DATA!r}), {steps}, {seed})))"
    )
    arguments: list[str] = json.loads(cluster.output(cluster.head, ["python", "-c", code]))
    return ["python", "-m", "openrlhf.cli.train_ppo_ray", *arguments]


def train(
    cluster: Cluster, job: list[str], steps: int, display: Display, timeout: float, out: Path
) -> list[dict[str, Any]]:
    """Submit the job, follow it, and return its events; a `UserError` gives the cause of a failure."""
    log = JobLog(out / "job.log")
    submit = [*SUBMIT, "--", *job]
    with display.bar(steps) as bar:
        code = cluster.follow(submit, log.write, lambda: bar.update(events_of(cluster)), timeout)
    if code:
        raise UserError(f"training failed: {log.cause()} (full log: {log.path.relative_to(ROOT)})")
    return events_of(cluster)


def by_phase(events: list[dict[str, Any]], submitted: float) -> dict[str, float]:
    """Seconds until engines and trainers had started, and seconds of training, from the events."""
    times = {event["name"]: float(event["time"]) for event in events if event["event"] == "phase"}
    up, end = times.get("models up", submitted), times.get("trained", submitted)
    return {"engines": up - submitted, "training": end - up}


def train_on_nodes(
    cell: Cell, image: str, layout: str, steps: int, seed: int, timeout: float, display: Display
) -> dict[str, Any]:
    """Train with the image on two nodes and return the report."""
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
    """Write the output of each node next to the report."""
    for name, text in cluster.logs().items():
        (out / f"{name}.log").write_text(text, encoding="utf-8")


def run_demo(
    cell: Cell,
    layout: str = LAYOUT,
    steps: int = STEPS,
    seed: int = SEED,
    timeout: float = TIMEOUT,
    *,
    again: bool = False,
) -> None:
    """Build a cell's image, train with it and print the report; ``timeout`` in seconds is for the job.

    Layout, steps and seed other than the defaults are not the test of the image, and leave no record. If the
    test passed before on this image (`testing.credit`), its report is printed, and it runs only ``again``.
    """
    for name, value, least, most in (
        ("--steps", steps, 1, MOST_STEPS),
        ("--seed", seed, 0, MOST_SEED),
        ("--timeout", timeout, 1, MOST_SECONDS),
    ):
        if not least <= value <= most:  # a NaN is not either
            raise UserError(f"{name} {value}: expected a number from {least:,} to {most:,}")
    if layout not in LAYOUTS:
        raise UserError(f"--layout {layout!r}: expected one of {', '.join(LAYOUTS)}")
    if cell.accelerator.kind != "cpu":
        raise UserError(f"{cell.id} needs GPUs; the demo runs on the cpu cells")
    console = Console()
    with exclusive_lock(folder(cell), "a demo"):
        display = Display(console)
        with display.phase("build", f"{cell.tag}, cached layers are used"):
            image = build(cell)
        is_test = (layout, steps, seed) == (LAYOUT, STEPS, SEED)
        record: AbstractContextManager[records.Tally] = nullcontext(records.Tally())
        if is_test:
            tested = records.subject(cell, connect().images.get(image))
            if not again and (before := credit.passed_before(tested, "demo")):
                evidence = records.folder_of(cell.id, before.inputs) / "evidence"
                demo_report.show(json.loads((evidence / before.evidence[0]).read_bytes()), console)
                return
            record = credit.recording(tested, "demo")
        path = folder(cell) / "report.json"
        with record as tally:
            report = train_on_nodes(cell, image, layout, steps, seed, timeout, display)
            path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
            tally.attach(path.read_bytes(), path.suffix)
            wrong = demo_report.shortfall(report, steps, learns=is_test)
            tally.count("demo", records.FAILED if wrong else records.PASSED)
        kept.keep(connect(), cell, tally.record)
    demo_report.show(report, console)
    console.print(f"report: {path.relative_to(ROOT)}")
    if wrong:
        raise UserError(wrong)
