"""A run that is preempted: it saves a checkpoint in time, continues from it, and is the undisturbed run."""

import hashlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
GRACE = 30
SECONDS = 600  # for what takes a minute on a quiet machine
EVENTS = "/events"
ADAPTIVE_KL = (  # with the reference model that it needs; its coefficient changes by 2 % in each step
    *("--train.colocate_actor_ref", "--ref.num_nodes", "1", "--ref.num_gpus_per_node", "2"),
    *("--algo.kl.init_coef", "0.1", "--algo.kl.target", "0.1", "--algo.kl.horizon", "640"),
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
    if not cell.versions["openrlhf"].startswith("0.11."):
        pytest.skip("this release saves no checkpoint on request")
    mounts = {str(disk): {"bind": CHECKPOINTS, "mode": "rw"}, str(folder): {"bind": EVENTS, "mode": "rw"}}
    environment = demo.ENVIRONMENT | {"RLHF_STACK_EVENTS": EVENTS}
    with Cluster(client, cell.tag, demo.NODES, environment, options={"volumes": mounts}) as running:
        demo.prepare(running, STEPS, seed=0)
        yield running


def steps(folder: Path) -> list[int]:
    """Return the numbers of the steps that have ended, in their order."""
    return [int(event["step"]) for event in events.read(folder) if event["event"] == "step"]


def learned(folder: Path) -> list[list[float]]:
    """Return reward, loss and gradient norm of each step, in their order."""
    names = "reward", "policy_loss", "actor_grad_norm"
    return [[event[name] for name in names] for event in events.read(folder) if event["event"] == "step"]


def weights(trained: Path) -> dict[str, str]:
    """Return the digest of each file of a trained model's weights."""
    found = {path.name: hashlib.sha256(path.read_bytes()) for path in trained.glob("*.safetensors")}
    assert found, f"no weights in {trained}"
    return {name: digest.hexdigest() for name, digest in found.items()}


@pytest.mark.integration
@pytest.mark.timeout(SECONDS * 3 + 300)
@pytest.mark.parametrize("layout", ["separate", "hybrid"])
def test_a_preempted_run_saves_in_time_and_ends_as_the_undisturbed_one(
    layout: str, cluster: Cluster, folder: Path, disk: Path
) -> None:
    """`checkpoint` saves while the run goes on; SIGTERM to `submit` saves later; the next run continues.

    Its steps have the rewards and losses of a run that nobody disturbed, and its last weights are those.
    In the undisturbed run each engine is on one node and has the trainer's weights; in the layout hybrid both
    nodes have an engine on the GPUs of the trainer's ranks, in separate the KL penalty is adaptive.
    """
    for file in folder.glob("*.jsonl"):
        file.unlink()
    training = demo.command(cluster, layout, STEPS, seed=0)
    training += ADAPTIVE_KL if layout == "separate" else ()
    printed: list[str] = []

    def submit(name: str) -> int:
        saved = [
            "--ckpt.path",
            f"{CHECKPOINTS}/{layout}/{name}",
            "--ckpt.save_steps",
            "100",
            "--ckpt.load_enable",
        ]
        words = [*training, *saved, "--ckpt.output_dir", f"{CHECKPOINTS}/{layout}/{name}/trained"]
        shell = ["sh", "-c", SUBMIT + " ".join(f"'{word}'" for word in words)]
        return cluster.follow(shell, printed.append, timeout=SECONDS)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(submit, "preempted")
        until(lambda: first.done() or bool(steps(folder)), "the first step")
        assert not first.done(), printed[-20:]
        (on_request,) = json.loads(cluster.output(cluster.head, ["rlhf-stack", "checkpoint", "--json"]))[
            "runs"
        ]
        assert on_request["saved"], on_request
        until(lambda: first.done() or max(steps(folder)) > on_request["step"], "a step after it")
        assert not first.done(), printed[-20:]
        terminated = time.monotonic()
        cluster.output(cluster.head, ["sh", "-c", f"kill -TERM $(cat {EVENTS}/pid)"])
        assert first.result() == 143, printed[-20:]
    assert time.monotonic() - terminated < GRACE
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
