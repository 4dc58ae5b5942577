"""Two nodes with IPv6 addresses in Ray: started by `rlhf-stack start --block`, and checked.

The check creates the group of a weight sync over both nodes, with the code of a run.
"""

import json

import docker
import pytest

from scripts.matrix.load import Cell
from scripts.testing import demo
from scripts.testing.cluster import Cluster, ContainerNode
from tests.network.waiting import TEST_SECONDS

OWN = "$(hostname -I | tr ' ' '\\n' | grep : | head -n 1)"
HEAD = "$(getent ahostsv6 head | head -n 1 | cut -d ' ' -f 1)"


def ipv6_start(node: ContainerNode, head: str | None) -> list[str]:
    """Return the `rlhf-stack start` of a node with its own IPv6 address."""
    role = "--head" if head is None else f"--join [{HEAD}]:6379"
    options = f"--num-gpus {node.gpus} --num-cpus {node.cpus} --object-store-memory {node.object_store}"
    command = f"exec rlhf-stack start {role} --node-ip-address {OWN} --auth none {options} --block"
    return ["bash", "-c", command]


@pytest.mark.timeout(TEST_SECONDS)
def test_nodes_with_ipv6_addresses_pass_the_network_check(
    nothing_left: None, client: docker.DockerClient, cell: Cell
) -> None:
    if cell.versions["ray"] != "2.55.0":
        pytest.skip("this Ray does not accept IPv6 addresses")
    with Cluster(client, cell.tag, demo.NODES, demo.ENVIRONMENT, start=ipv6_start, ipv6=True) as cluster:
        report = json.loads(
            cluster.output(cluster.head, ["rlhf-stack", "check-network", "--json", "--floor", "0.0001"])
        )
        addresses = {node["address"] for node in cluster.addresses}
    assert len(addresses) == len(demo.NODES)
    assert all(":" in address for address in addresses)
    assert {node["address"] for node in report["nodes"]} == addresses
    assert report["is_well"], report
