"""Two containers of the image are two nodes of one cluster, with their own addresses and filesystems."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable

import docker
import pytest
from docker.models.containers import Container
from rich.console import Console

from scripts.errors import UserError
from scripts.matrix.load import Cell
from scripts.paths import ROOT
from scripts.testing import demo, records
from scripts.testing.cluster import LABEL, Cluster, owner_label, sweep
from tests.network import diagnosis
from tests.network.remote import SERVER, reachable
from tests.network.waiting import TEST_SECONDS, WAIT_SECONDS, until

ON_EVERY_NODE = """
import json, os, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
ray.init(address="auto", log_to_driver=False)

@ray.remote(num_cpus=0)
def report():
    return [ray.util.get_node_ip_address(), os.uname().nodename]

nodes = [node["NodeID"] for node in ray.nodes()]
answers = [report.options(scheduling_strategy=On(node, soft=False)).remote() for node in nodes]
print(json.dumps(ray.get(answers, timeout=60)))
"""


@pytest.mark.timeout(TEST_SECONDS)
def test_nodes_have_their_own_addresses(start: Callable[..., Cluster]) -> None:
    """A Ray worker runs on each machine."""
    cluster = start()
    answers = json.loads(cluster.output(cluster.head, ["python", "-c", ON_EVERY_NODE]).splitlines()[-1])
    assert {answer[1] for answer in answers} == {"head", "worker"}
    assert {answer[0] for answer in answers} == {node["address"] for node in cluster.addresses}


@pytest.mark.timeout(TEST_SECONDS)
def test_doctor_queries_every_node(start: Callable[..., Cluster]) -> None:
    """doctor finds no error and no difference between the nodes."""
    cluster = start()
    command = ["sh", "-c", "rlhf-stack doctor --json --timeout 120 || test $? -ne 2"]
    report = json.loads(cluster.output(cluster.head, command))
    assert diagnosis.errors(report) == []
    assert diagnosis.addresses(report) == {node["address"] for node in cluster.addresses}
    assert [f["severity"] for f in report["findings"] if f["id"] == "env-nodes"] == ["ok"]


@pytest.mark.timeout(TEST_SECONDS)
def test_doctor_names_a_lost_node(start: Callable[..., Cluster]) -> None:
    """A node was killed; Ray finds it dead after about a minute."""
    cluster = start()
    (address,) = (node["address"] for node in cluster.addresses if not node["is_head"])

    def lost() -> list[str]:
        command = ["sh", "-c", "rlhf-stack doctor --json --timeout 20 || test $? -ne 2"]
        report = json.loads(cluster.output(cluster.head, command))
        return [one["evidence"] for one in report["findings"] if one["id"] == "lost-nodes"]

    assert lost() == []
    cluster.containers[1].kill()
    until(lambda: any(address in evidence for evidence in lost()), "doctor to name the killed node")


@pytest.mark.timeout(TEST_SECONDS)
def test_a_killed_node_is_named(start: Callable[..., Cluster]) -> None:
    """A node is killed while a command on the head would wait for it."""
    cluster = start()
    worker = cluster.containers[1]
    with pytest.raises(UserError, match=r"node worker ended: it was killed"):
        cluster.follow(["sh", "-c", "echo begun; sleep 100"], line=lambda _: worker.kill())


@pytest.mark.timeout(TEST_SECONDS)
def test_a_job_that_fails_is_explained(start: Callable[..., Cluster], cell: Cell) -> None:
    """The exception that ended it is reported, not the last line of Ray's log."""
    cluster = start()
    job = ["python", "-c", "raise ValueError('the reason')"]
    with pytest.raises(UserError, match=r"training failed: ValueError: the reason"):
        demo.train(cluster, job, 1, demo.Display(Console(quiet=True)), 120, demo.folder(cell))


@pytest.mark.timeout(TEST_SECONDS)
def test_a_lost_head_is_reported_to_the_follower_of_a_job(client: docker.DockerClient, cell: Cell) -> None:
    """On another machine, one line names the restarted head and the job."""
    with Cluster(client, cell.tag, demo.NODES, start=reachable) as cluster:
        submit = ["rlhf-stack", "submit", "--address", SERVER, "--", "sh", "-c", "echo begun; sleep 600"]
        # No node of the cluster: one of Ray 2.12 ends with the head, and with it what runs there.
        (network,) = cluster.head.attrs["NetworkSettings"]["Networks"]
        machine = ["--rm", "--network", network, "--label", f"{LABEL}={owner_label()}", cell.tag]
        following = subprocess.Popen(
            ["docker", "run", *machine, *submit],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert following.stdout is not None
        assert "begun\n" in following.stdout
        cluster.head.restart(timeout=0)
        _, errors = following.communicate(timeout=WAIT_SECONDS)
    assert following.returncode == 122, errors
    # Lost, or silent if its restart takes longer than a follower waits.
    ended = rf"error: Ray's head at {re.escape(SERVER)} (was lost|did not answer) .*\bjob raysubmit_"
    assert re.search(ended, errors, re.IGNORECASE), errors
    assert "Traceback" not in errors


@pytest.mark.timeout(TEST_SECONDS)
def test_nodes_that_do_not_join_are_named(client: docker.DockerClient, cell: Cell) -> None:
    """After a deadline too short for any node the error names what is missing, and nothing is left."""
    with pytest.raises(UserError, match=r"the cluster did not start: .* after \d+ s"):
        Cluster(client, cell.tag, demo.NODES, timeout=1).__enter__()


def start_demo(*arguments: str) -> "subprocess.Popen[str]":
    """Start the demo as a process, with too few steps to count as a test of the image."""
    command = [sys.executable, "-m", "scripts", "demo", "--steps", "3", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def demos(cell: Cell) -> list[records.Record]:
    """Return the records of the demos of a cell."""
    return [record for record in records.history(cell.id) if record.suite == "demo"]


def containers_of(client: docker.DockerClient, process: "subprocess.Popen[str]") -> list[Container]:
    """Return the running containers of a process of this machine."""
    found = client.containers.list(filters={"label": LABEL}, ignore_removed=True)
    return [container for container in found if f":{process.pid}:" in container.labels[LABEL]]


@pytest.mark.timeout(TEST_SECONDS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing(
    client: docker.DockerClient, cell: Cell, number: signal.Signals
) -> None:
    """SIGINT and SIGTERM while the nodes are starting."""
    process = start_demo(cell.id)
    until(lambda: len(containers_of(client, process)) == 2, "two nodes")
    process.send_signal(number)
    _, errors = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 130
    assert errors.strip().endswith("interrupted")
    assert containers_of(client, process) == []


@pytest.mark.timeout(TEST_SECONDS)
def test_a_demo_names_the_node_that_died(client: docker.DockerClient, cell: Cell) -> None:
    """A node may die at any time: one line, exit code 2, nothing left, and no record against the image."""
    before = demos(cell)
    process = start_demo(cell.id)
    until(lambda: len(containers_of(client, process)) == 2, "two nodes")
    worker = next(item for item in containers_of(client, process) if str(item.name).endswith("-worker"))
    until(lambda: b"Ray runtime started" in worker.logs(), "the worker to join")
    worker.kill()
    _, errors = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 2
    assert "error: node worker ended: it was killed" in errors
    assert "Traceback" not in errors
    assert containers_of(client, process) == []
    assert demos(cell) == before


@pytest.mark.timeout(TEST_SECONDS)
def test_the_next_process_removes_what_a_killed_one_left(client: docker.DockerClient, cell: Cell) -> None:
    """The process ended by SIGKILL, which prevents any clean-up."""
    process = start_demo(cell.id)
    until(lambda: len(containers_of(client, process)) == 2, "two nodes")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=WAIT_SECONDS)
    assert len(containers_of(client, process)) == 2
    sweep(client)
    assert containers_of(client, process) == []
