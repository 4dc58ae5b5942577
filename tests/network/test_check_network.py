"""The network check on three containers, whose links are blocked and slowed one at a time."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import docker
import pytest

from scripts.matrix.load import Cell
from scripts.testing.cluster import Cluster, ContainerNode
from tests.network import links
from tests.network.waiting import TEST_SECONDS

ATTEMPTS = 5

NODES = (ContainerNode("head", gpus=1), ContainerNode("left", gpus=1), ContainerNode("right", gpus=1))
SLOW_MEGABITS = 80  # 0.01 GB/s; the bridge of one machine has several GB/s


@pytest.fixture(scope="module")
def cluster(client: docker.DockerClient, cell: Cell) -> Iterator[Cluster]:
    """Start three nodes for all tests of this file, each of which restores the links."""
    if reason := links.obstacle():
        pytest.skip(reason)
    with Cluster(client, cell.tag, NODES) as running:
        yield running


@pytest.fixture
def after(cluster: Cluster) -> Iterator[ExitStack]:
    """Return a stack of callbacks that restore links after the test."""
    with ExitStack() as stack:
        yield stack


def check_network(cluster: Cluster, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Return exit code, report and progress messages of a network check on the head."""
    command = [
        "docker",
        "exec",
        str(cluster.head.id),
        "rlhf-stack",
        "check-network",
        "--json",
        "--size",
        "8",
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TEST_SECONDS - 60, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def by_hosts(report: dict[str, Any]) -> dict[frozenset[str], dict[str, Any]]:
    """Return the links of a report by the host names of their ends."""
    hosts = [node["host"] for node in report["nodes"]]
    return {frozenset((hosts[link["first"]], hosts[link["second"]])): link for link in report["links"]}


def address(cluster: Cluster, name: str) -> str:
    """Return the address of a node by its name."""
    return next(str(node["address"]) for node in cluster.addresses if node["host"] == name)


@pytest.mark.timeout(TEST_SECONDS)
def test_healthy_links_pass(cluster: Cluster) -> None:
    """Every pair and then the whole group is measured; a low rate is accepted."""
    for _ in range(ATTEMPTS):  # other load on the machine can make a link slower than half of the median
        code, report, progress = check_network(cluster, "--floor", "0.0001")
        assert code == (0 if report["is_well"] else 1)
        if report["is_well"]:
            break
    assert report["is_well"], report["links"]
    assert report["schema"] == "rlhf-stack/rehearse/1"
    assert {frozenset(pair) for pair in (("head", "left"), ("head", "right"), ("left", "right"))} == set(
        by_hosts(report)
    )
    assert {link["verdict"] for link in report["links"]} == {"ok"}
    assert all(link["forth"] > 0 and link["back"] > 0 for link in report["links"])
    assert len(report["group"]["receivers"]) == len(NODES)
    assert report["group"]["wrong"] == []
    assert progress.count("round ") == len(NODES)


@pytest.mark.timeout(TEST_SECONDS)
def test_a_dead_link_is_named_and_the_others_pass(cluster: Cluster, after: ExitStack) -> None:
    """The link is between two workers that both reach the head, so Ray detects nothing."""
    left, right = cluster.containers[1:]
    for receiver, sender in ((left, "right"), (right, "left")):
        links.block(receiver, address(cluster, sender))
        after.callback(links.unblock, receiver)
    for _ in range(ATTEMPTS):  # as above
        code, report, _ = check_network(cluster, "--timeout", "5", "--floor", "0.0001")
        assert code == 1
        verdicts = {hosts: link["verdict"] for hosts, link in by_hosts(report).items()}
        assert verdicts.pop(frozenset(("left", "right"))) == "cannot talk"
        if set(verdicts.values()) == {"ok"}:
            break
    assert set(verdicts.values()) == {"ok"}
    broken = by_hosts(report)[frozenset(("left", "right"))]
    assert "GLOO_SOCKET_IFNAME" in broken["remedy"]
    assert "left to right" in broken["why"]
    assert report["group"] is None


@pytest.mark.timeout(TEST_SECONDS)
def test_a_link_blocked_in_one_direction_is_named(cluster: Cluster, after: ExitStack) -> None:
    """The right node can connect to the left one, but not vice versa."""
    right = cluster.containers[2]
    links.block(right, address(cluster, "left"), only_new=True)
    after.callback(links.unblock, right)
    code, report, _ = check_network(cluster, "--timeout", "5")
    assert code == 1
    broken = by_hosts(report)[frozenset(("left", "right"))]
    assert broken["verdict"] in ("one way", "cannot talk")
    assert "open all ports" in broken["remedy"] or "GLOO_SOCKET_IFNAME" in broken["remedy"]


@pytest.mark.timeout(TEST_SECONDS)
def test_a_slow_node_is_named(cluster: Cluster, after: ExitStack) -> None:
    """The node sends slowly and receives at full speed."""
    right = cluster.containers[2]
    links.slow_down(right, SLOW_MEGABITS)
    after.callback(links.speed_up, right)
    code, report, _ = check_network(cluster, "--floor", "0.03")
    assert code == 1
    found = by_hosts(report)
    others = found[frozenset(("head", "left"))]
    for name in ("head", "left"):
        link = found[frozenset((name, "right"))]
        assert link["verdict"] == "slow"
        assert f"right to {name}" in link["why"]
        assert min(link["forth"], link["back"]) < min(others["forth"], others["back"])
