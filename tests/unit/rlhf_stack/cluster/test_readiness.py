"""When a Ray cluster is what a job needs, and what it lacks."""

from typing import Any

from rlhf_stack.cluster.readiness import missing, parse


def entry(address: str, gpus: float, head: bool = False, alive: bool = True) -> dict[str, Any]:
    """A row of ``ray.nodes()``."""
    resources = {"CPU": 8.0, "GPU": gpus} | ({"node:__internal_head__": 1.0} if head else {})
    return {"NodeManagerAddress": address, "NodeManagerHostname": "h", "Resources": resources, "Alive": alive}


def test_head_comes_first_and_the_dead_are_left_out() -> None:
    """In the order in which people think of them."""
    found = parse([entry("10.0.0.3", 2), entry("10.0.0.9", 2, head=True), entry("10.0.0.4", 2, alive=False)])
    assert [node.address for node in found] == ["10.0.0.9", "10.0.0.3"]


def test_a_machine_that_was_started_again_is_one() -> None:
    """While Ray still takes the old node for alive."""
    found = parse([entry("10.0.0.2", 2, head=True), entry("10.0.0.3", 2), entry("10.0.0.3", 2)])
    assert [node.address for node in found] == ["10.0.0.2", "10.0.0.3"]
    assert missing(found, nodes=3, gpus=6) == "2 of 3 nodes joined (10.0.0.2, 10.0.0.3), 4 of 6 GPUs"


def test_complete_cluster_lacks_nothing() -> None:
    """Also with more than was asked for."""
    found = parse([entry("10.0.0.2", 2, head=True), entry("10.0.0.3", 2)])
    assert missing(found, nodes=2, gpus=4) == ""
    assert missing(found, nodes=1, gpus=1) == ""


def test_what_is_missing_is_named() -> None:
    """Who joined, and how many GPUs there are."""
    found = parse([entry("10.0.0.2", 2, head=True)])
    assert missing(found, nodes=2, gpus=4) == "1 of 2 nodes joined (10.0.0.2), 2 of 4 GPUs"
    assert missing([], nodes=1, gpus=0) == "0 of 1 nodes joined (none)"
