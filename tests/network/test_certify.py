"""`rlhf-stack certify` on containers as nodes, the head without a GPU: rungs that use nodes or take seconds.

All rungs are climbed on simulated nodes in ``tests/cluster/test_certify.py``.
"""

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import msgspec
import pytest
from docker.models.images import Image
from rlhf_stack.certify.certificate import FILE, RECORDS
from rlhf_stack.certify.ladder import NAMES
from rlhf_stack.certify.model import NOT_CLIMBED, PASSED, Certificate, Record

from scripts.docker.client import docker_command
from scripts.matrix.load import Cell
from scripts.release import certificates
from scripts.testing import records
from scripts.testing.cluster import Cluster, ContainerNode

NODES = (ContainerNode("head", gpus=0), ContainerNode("left", gpus=2), ContainerNode("right", gpus=2))
SECONDS = 1800  # for what takes three minutes on a quiet machine
OUT = "/tmp/certificate"
ON_EACH = ("attention", "device-memory", "ipc")
BETWEEN = ("collectives", "network", "sync", "train-separate", "lost-rank")
GPU_ALONE = {"streams": "NCCL and CUDA streams need a GPU"}
NEWER_ALONE = {  # by rungs that OpenRLHF 0.5 and vLLM 0.4 do not have, and which say so within seconds
    "sleep": "vLLM 0.4 has no sleep mode",
    "train-colocated": "this release of OpenRLHF has no engines on the trainer's GPUs that sync by IPC",
    "throughput": "the engine of OpenRLHF 0.5 generates in batches alone",
}

pytestmark = [pytest.mark.integration, pytest.mark.timeout(SECONDS + 300)]


@dataclass(frozen=True)
class Climb:
    """A copy of a certificate and its records, and what was left of it in ``/tmp`` of the nodes.

    ``nodes`` are the addresses of the cluster, ``gpus`` those of nodes with GPUs.
    """

    file: Path
    certificate: Certificate
    nodes: frozenset[str]
    gpus: frozenset[str]
    left: tuple[str, ...]

    def details(self, rung: str) -> dict[str, Any]:
        """Return what a rung measured."""
        content = (self.file.parent / RECORDS / f"{rung}.json").read_bytes()
        return msgspec.json.decode(content, type=Record).details


def absent(cell: Cell) -> dict[str, str]:
    """Return the rungs that are selected and that the cell does not have, with their reasons."""
    return GPU_ALONE | (NEWER_ALONE if cell.versions["openrlhf"].startswith("0.5") else {})


@pytest.fixture(scope="module")
def climb(client: docker.DockerClient, cell: Cell, tmp_path_factory: pytest.TempPathFactory) -> Climb:
    """Climb once for all tests of this file."""
    copy = tmp_path_factory.mktemp("certify")
    words = [word for name in (*ON_EACH, *BETWEEN, *absent(cell)) for word in ("--rung", name)]
    printed: list[str] = []
    with Cluster(client, cell.tag, NODES) as cluster:
        code = cluster.follow(
            ["rlhf-stack", "certify", "--out", OUT, *words], printed.append, timeout=SECONDS
        )
        assert code == 0, printed
        command = [*docker_command(), "cp", f"{cluster.head.id}:{OUT}", str(copy)]
        subprocess.run(command, check=True, capture_output=True)
        left = [name for node in cluster.containers for name in cluster.output(node, ["ls", "/tmp"]).split()]
        nodes = {str(node["address"]): node["gpus"] for node in cluster.addresses}
    file = copy / Path(OUT).name / FILE
    gpus = frozenset(address for address, count in nodes.items() if count)
    return Climb(file, certificates.parse(file.read_bytes(), file), frozenset(nodes), gpus, tuple(left))


def test_rungs_pass_or_have_the_reason_why_they_were_not_climbed(climb: Climb, cell: Cell) -> None:
    """None fails."""
    rungs = climb.certificate.rungs
    passed = ("facts", *ON_EACH, *BETWEEN)
    not_climbed = {name: "it was not selected" for name in NAMES if name not in passed} | absent(cell)
    assert {rung.name: rung.reason for rung in rungs if rung.state == NOT_CLIMBED} == not_climbed
    assert {rung.name for rung in rungs if rung.state == PASSED} == {*passed}
    assert all(rung.measurements for rung in rungs if rung.state == PASSED)


def test_the_certificate_is_added(climb: Climb, cell: Cell, image: Image, tmp_path: Path) -> None:
    """It names the inputs of the image under test and the fake GPUs of each node."""
    inputs = records.subject(cell, image).inputs
    added = certificates.add(climb.file, {inputs: cell.id}, tmp_path)
    assert added.read_bytes() == climb.file.read_bytes()
    assert sorted(machine.fake_gpus for machine in climb.certificate.machines) == [0, 2, 2]
    assert {machine.gpus for machine in climb.certificate.machines} == {0}


def test_rungs_use_every_node_with_gpus(climb: Climb) -> None:
    """A rung of one GPU is climbed on each node; the others have ranks on both."""
    assert set(climb.details("facts")) == climb.nodes
    for rung in ON_EACH:
        assert {name.rpartition(" on ")[2] for name in climb.details(rung)} == climb.gpus
    assert set(climb.details("collectives")["nodes"]) == climb.gpus
    ranks = climb.details("sync")["gloo"]["ranks"]
    assert {name.rpartition(" on ")[2] for name in ranks} == climb.gpus
    network = climb.details("network")
    (link,) = network["links"]
    assert {network["nodes"][link[end]]["address"] for end in ("first", "second")} == climb.gpus
    group = network["group"]
    assert {
        network["nodes"][node]["address"] for node in (group["sender"], *group["receivers"])
    } == climb.gpus


def test_the_lost_rank_is_on_another_node_than_the_trainer(climb: Climb) -> None:
    """The trainer's error names it."""
    lost = climb.details("lost-rank")["gloo"]
    trainer, killed = (
        text.partition(" on ")[2].partition(":")[0] for text in (lost["error"], lost["killed"])
    )
    assert {trainer, killed} == climb.gpus
    assert f"{lost['killed']} does not answer" in lost["error"]


def test_the_trainer_sends_its_weights_to_another_node(climb: Climb) -> None:
    """Each sync is verified, and no engine straddles nodes."""
    events = climb.details("train-separate")["events"]
    (placement,) = (event for event in events if event["event"] == "placement")
    actor, engines = placement["groups"]["actor"], placement["groups"]["engines"]
    assert {*actor} | {*engines} == climb.gpus
    assert {*actor} != {*engines}
    verified = [event for event in events if event["event"] == "verify"]
    assert len(verified) == len([event for event in events if event["event"] == "sync"]) > 0
    assert all(event["equal"] and event["parameters"] for event in verified)


def test_the_record_has_pairs_the_selected_backend_and_tuned_settings(climb: Climb) -> None:
    """Every pair of four GPUs is measured, `auto` selects gloo without a GPU, and the run fits."""
    assert climb.details("collectives")["pairs"] == "all 6"
    selected = climb.details("sync")["auto"]
    assert (selected["selected"], selected["why"].endswith("has no GPU")) == ("gloo", True)
    chosen = climb.details("train-separate")["tune"]
    assert chosen["problems"] == []
    assert chosen["settings"]
    assert set(chosen["gpu_memory"]) == climb.gpus


def test_nothing_is_left_on_the_nodes(climb: Climb) -> None:
    """The files of model and prompts were removed on all nodes."""
    assert [name for name in climb.left if name.startswith("rlhf-stack-certify")] == []
