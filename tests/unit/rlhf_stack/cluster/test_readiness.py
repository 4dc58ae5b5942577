"""Readiness of a Ray cluster: nodes from Ray's table, and the description of what is missing."""

from typing import Any

import pytest
from rlhf_stack.cluster import readiness
from rlhf_stack.cluster.readiness import describe_missing, parse_nodes

from tests.unit.stub_server import serving


def entry(address: str, gpus: float, head: bool = False, alive: bool = True) -> dict[str, Any]:
    """A row of ``ray.nodes()``."""
    resources = {"CPU": 8.0, "GPU": gpus} | ({"node:__internal_head__": 1.0} if head else {})
    return {"NodeManagerAddress": address, "NodeManagerHostname": "h", "Resources": resources, "Alive": alive}


def test_head_comes_first_and_dead_nodes_are_left_out() -> None:
    found = parse_nodes(
        [entry("10.0.0.3", 2), entry("10.0.0.9", 2, head=True), entry("10.0.0.4", 2, alive=False)]
    )
    assert [node.address for node in found] == ["10.0.0.9", "10.0.0.3"]


def test_restarted_machine_counts_once() -> None:
    """Ray still lists the old node as alive."""
    found = parse_nodes([entry("10.0.0.2", 2, head=True), entry("10.0.0.3", 2), entry("10.0.0.3", 2)])
    assert [node.address for node in found] == ["10.0.0.2", "10.0.0.3"]
    assert describe_missing(found, nodes=3, gpus=6) == "2 of 3 nodes joined (10.0.0.2, 10.0.0.3), 4 of 6 GPUs"


def test_nothing_is_missing_in_a_complete_cluster() -> None:
    found = parse_nodes([entry("10.0.0.2", 2, head=True), entry("10.0.0.3", 2)])
    assert describe_missing(found, nodes=2, gpus=4) == ""
    assert describe_missing(found, nodes=1, gpus=1) == ""


def test_missing_nodes_and_gpus_are_counted() -> None:
    found = parse_nodes([entry("10.0.0.2", 2, head=True)])
    assert describe_missing(found, nodes=2, gpus=4) == "1 of 2 nodes joined (10.0.0.2), 2 of 4 GPUs"
    assert describe_missing([], nodes=1, gpus=0) == "0 of 1 nodes joined (none)"


@pytest.mark.usefixtures("behind_proxy")
def test_the_job_server_is_asked_without_a_proxy() -> None:
    """`start --expect-nodes` ended Ray."""
    with serving(200) as port:
        assert readiness._answers(f"http://127.0.0.1:{port}") == ""
    with serving(500) as port:
        assert "HTTP Error 500" in readiness._answers(f"http://127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("dashboard", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8265"),
        ("0.0.0.0", "http://127.0.0.1:8265"),  # noqa: S104
        ("::", "http://127.0.0.1:8265"),
        ("10.0.0.3", "http://10.0.0.3:8265"),
        ("fd00::3", "http://[fd00::3]:8265"),
    ],
)
def test_the_job_server_listens_where_the_dashboard_does(dashboard: str, url: str) -> None:
    assert readiness.job_server(dashboard) == url
