"""A run that is preempted: it saves a checkpoint in time, continues from it, and is the undisturbed run."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import docker
import pytest
from rlhf_stack.telemetry import events

from scripts.matrix.load import Cell
from scripts.testing import demo
from scripts.testing.cluster import Cluster
from tests.faults.runs import CHECKPOINTS
from tests.network.waiting import until

STEPS = 8
QUICK_STEPS, QUICK_SAVES = 60, 10  # of OpenRLHF 0.5.1, of which many end before a job is stopped
GRACE = 30
SECONDS = 600  # for what takes a minute on a quiet machine
EVENTS = "/events"
ON_REQUEST = "0.11."  # releases of OpenRLHF that save a checkpoint on request
NESTED, FLAT = (
    ("--ckpt.path", "--ckpt.save_steps", "--ckpt.output_dir", "--ckpt.load_enable"),
    ("--ckpt_path", "--save_steps", "--save_path", "--load_checkpoint"),
)
SUBMIT = f"echo $$ > {EVENTS}/pid; exec rlhf-stack submit --grace {GRACE} -- "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder on the host with the events of both nodes."""
    return shared(tmp_path_factory.mktemp("preemption") / "events")


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder on the host with the checkpoints and the trained models."""
    return shared(tmp_path_factory.mktemp("preemption") / "checkpoints")


def shared(folder: Path) -> Path:
    """Make a folder into which the containers' user, which has another uid, can write."""
    folder.mkdir()
    folder.chmod(0o777)
    return folder


@pytest.fixture(scope="module")
def cluster(client: docker.DockerClient, cell: Cell, folder: Path, disk: Path) -> Iterator[Cluster]:
    """The demo's two nodes, which share the folders of events and checkpoints."""
    mounts = {str(disk): {"bind": CHECKPOINTS, "mode": "rw"}, str(folder): {"bind": EVENTS, "mode": "rw"}}
    environment = demo.ENVIRONMENT | {"RLHF_STACK_EVENTS": EVENTS}
    with Cluster(client, cell.tag, demo.NODES, environment, options={"volumes": mounts}) as running:
        count = STEPS if cell.versions["openrlhf"].startswith(ON_REQUEST) else QUICK_STEPS
        demo.prepare(running, count, seed=0)
        yield running


def steps(folder: Path) -> list[int]:
    """Return the numbers of the steps that have ended, in their order."""
    return [int(event["step"]) for event in events.read(folder) if event["event"] == "step"]


def learned(folder: Path) -> list[list[float]]:
    """Return reward, losses and gradient norm of each step, if the release has them, in their order."""
    names = "reward", "policy_loss", "actor_grad_norm", "critic_loss"
    found = [event for event in events.read(folder) if event["event"] == "step"]
    return [[event[name] for name in names if name in event] for event in found]


def weights(trained: Path) -> dict[str, str]:
    """Return the digest of each file of a trained model's weights."""
    found = {path.name: hashlib.sha256(path.read_bytes()) for path in trained.glob("*.safetensors")}
    assert found, f"no weights in {trained}"
    return {name: digest.hexdigest() for name, digest in found.items()}


def submitter(
    cluster: Cluster,
    layout: str,
    folder: Path,
    flags: Sequence[str],
    printed: list[str],
    *,
    count: int = STEPS,
    every: int = 100,
) -> Callable[[str], int]:
    """Remove the events of earlier runs; return a function that submits a run of ``count`` steps.

    It takes the name of the folder of the checkpoints, saved ``every`` so many steps, and the trained model,
    and returns the exit code.
    """
    for file in folder.glob("*.jsonl"):
        file.unlink()
    training = demo.command(cluster, layout, count, seed=0)
    path, save, trained, load = flags

    def submit(name: str) -> int:
        own = f"{CHECKPOINTS}/{layout}/{name}"
        words = [*training, path, own, save, str(every), trained, f"{own}/trained", load]
        shell = ["sh", "-c", SUBMIT + " ".join(f"'{word}'" for word in words)]
        return cluster.follow(shell, printed.append, timeout=SECONDS)

    return submit


def terminate(cluster: Cluster, running: Future[int], printed: Sequence[str]) -> None:
    """Send SIGTERM to the `submit` that is ``running``, which ends within its time."""
    assert not running.done(), printed[-20:]
    began = time.monotonic()
    cluster.output(cluster.head, ["sh", "-c", f"kill -TERM $(cat {EVENTS}/pid)"])
    assert running.result() == 143, printed[-20:]
    assert time.monotonic() - began < GRACE


@pytest.mark.timeout(SECONDS * 3 + 300)
def test_a_run_of_a_release_without_requests_ends_as_the_undisturbed_one(
    cluster: Cluster, cell: Cell, folder: Path, disk: Path
) -> None:
    """SIGTERM stops it; the next one continues from the last checkpoint, as if it had not been stopped."""
    if cell.versions["openrlhf"].startswith(ON_REQUEST):
        pytest.skip("this release saves a checkpoint on request")
    printed: list[str] = []
    submit = submitter(cluster, "spread", folder, FLAT, printed, count=QUICK_STEPS, every=QUICK_SAVES)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(submit, "preempted")
        until(
            lambda: first.done() or max(steps(folder), default=0) > QUICK_SAVES, "a step after a checkpoint"
        )
        terminate(cluster, first, printed)
    stopped = steps(folder)
    assert len(stopped) < QUICK_STEPS, "the run had ended before it was preempted"
    assert submit("preempted") == 0, printed[-20:]
    resumed = steps(folder)[len(stopped) :]
    assert QUICK_SAVES < resumed[0] <= stopped[-1] + 1, "it did not continue from a checkpoint"
    assert resumed == list(range(resumed[0], QUICK_STEPS + 1))
    count = len(steps(folder))
    assert submit("undisturbed") == 0, printed[-20:]
    both = learned(folder)
    preempted = [*both[: resumed[0] - 1], *both[len(stopped) : count]]
    assert preempted == both[count:]
    trained = [weights(disk / "spread" / name / "trained") for name in ("preempted", "undisturbed")]
    assert trained[0] == trained[1]


@pytest.mark.timeout(SECONDS * 3 + 300)
@pytest.mark.parametrize("layout", ["separate", "hybrid"])
def test_a_preempted_run_saves_in_time_and_ends_as_the_undisturbed_one(
    layout: str, cluster: Cluster, cell: Cell, folder: Path, disk: Path
) -> None:
    """`checkpoint` saves while the run goes on; SIGTERM to `submit` saves later; the next run continues.

    Its steps have the rewards and losses of a run that nobody disturbed, and its last weights are those.
    In the undisturbed run each engine is on one node and has the trainer's weights; in the layout hybrid both
    nodes have an engine on the GPUs of the trainer's ranks.
    """
    if not cell.versions["openrlhf"].startswith(ON_REQUEST):
        pytest.skip("this release saves no checkpoint on request")
    printed: list[str] = []
    submit = submitter(cluster, layout, folder, NESTED, printed)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(submit, "preempted")
        until(lambda: first.done() or bool(steps(folder)), "the first step")
        assert not first.done(), printed[-20:]
        (on_request,) = json.loads(cluster.output(cluster.head, ["rlhf-stack", "checkpoint", "--json"]))[
            "runs"
        ]
        assert on_request["saved"], on_request
        until(lambda: first.done() or max(steps(folder)) > on_request["step"], "a step after it")
        terminate(cluster, first, printed)
    before = steps(folder)
    assert before == list(range(1, len(before) + 1))
    said = [line for line in printed if line.startswith("rlhf-stack:")]
    assert any(line.endswith(f"from the checkpoint of step {before[-1]}") for line in said), (before, said)
    assert len(before) < STEPS, "the run had ended before it was preempted"
    assert submit("preempted") == 0, printed[-20:]
    assert steps(folder) == list(range(1, STEPS + 1))
    assert [event["step"] for event in events.read(folder) if event["event"] == "preemption"] == [
        on_request["step"],
        before[-1],
    ]
    resumed = len(events.read(folder))
    assert submit("undisturbed") == 0, printed[-20:]
    both = learned(folder)
    assert both[:STEPS] == both[STEPS:]
    trained = [weights(disk / layout / name / "trained") for name in ("preempted", "undisturbed")]
    assert trained[0] == trained[1]
    undisturbed = events.read(folder)[resumed:]
    engines = [event for event in undisturbed if event["event"] == "engine"]
    assert not any(event["straddles"] for event in engines)
    nodes = {rank["node_id"] for event in engines for rank in event["ranks"]}
    assert len(nodes) == len(engines) == (2 if layout == "hybrid" else 1)
    verified = [event for event in undisturbed if event["event"] == "verify"]
    assert [event["equal"] for event in verified] == [True] * STEPS
    assert all(event["parameters"] for event in verified)
