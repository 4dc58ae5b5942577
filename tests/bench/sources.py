"""Seconds of a weight sync by the number of trainer ranks that send, each on its own node.

``python -m tests.bench.sources [--cell CELL] [--sources 1 2 3] [--json]`` on the built image: containers of
trainer ranks, whose links ``tc`` limits to 100 Mbit/s each, and one of two engine workers, which receives at
most 250 Mbit/s (needs root and iproute2 on the host). All are measured in the same processes.
"""

import os
from typing import Any

import docker
from docker.models.containers import Container

from scripts.docker.client import connect, with_docker_errors
from scripts.errors import run
from scripts.matrix.load import find, load
from scripts.testing.cluster import LABEL, owner_label, remove_on_exit
from scripts.testing.in_image import local_image
from tests.bench.results import Row, parser, show
from tests.bench.sync import SECONDS, answer, started
from tests.network import links

INSIDE = "/opt/bench/sources_ranks.py"
SENDS, RECEIVES = 100, 250  # 10^6 bit/s of each link


def measured(client: docker.DockerClient, image: str, counts: list[int], repeat: int) -> dict[str, Any]:
    """Return the seconds of a sync by the number of sources, and the bytes of the weights."""
    network = client.networks.create(
        f"rlhf-stacks-bench-sources-{os.getpid()}", labels={LABEL: owner_label()}
    )
    containers: list[Container] = []
    with remove_on_exit(containers, [network]):
        nodes = []
        for _ in range(max(counts) + 1):
            idle = client.containers.create(image, ["sleep", str(SECONDS)], network=network.name)
            containers.append(idle)
            idle.start()
            nodes.append(idle)
        *senders, receiver = nodes
        for sender in senders:
            links.slow_down(sender, SENDS)
        common = ["--counts", *map(str, counts), "--repeat", str(repeat), "--sources"]
        common += [each.attrs["NetworkSettings"]["Networks"][network.name]["IPAddress"] for each in senders]
        with links.slow_towards(receiver, RECEIVES):
            for rank, node in enumerate(nodes):
                role = [] if node is receiver else ["--rank", str(rank)]
                options = {"network_mode": f"container:{node.id}"}
                containers.append(started(client, image, [*common, *role], INSIDE, **options))
            return answer(containers[-1])


def main() -> int:
    """Run the command line."""
    options = parser("sources", __doc__)
    options.add_argument("--sources", type=int, nargs="+", default=[1, 2, 3])
    options.add_argument("--repeat", type=int, default=3)
    arguments = options.parse_args()
    client, matrix = connect(), load()
    image = local_image(client, find(matrix, arguments.cell or matrix.default))
    found = measured(client, image, arguments.sources, arguments.repeat)
    table = [
        Row(f"{count} of {SENDS} Mbit/s each, {size / 1e6:.0f} MB", "s", seconds, size * 8e-6 / limit)
        for size in [found["bytes"]]
        for count, seconds in zip(arguments.sources, found["seconds"], strict=True)
        for limit in [min(count * SENDS, RECEIVES)]
    ]
    show(table, ["the peer is the time in which these links carry the same bytes"], arguments.json, "links")
    return 0


if __name__ == "__main__":
    run(with_docker_errors(main))
