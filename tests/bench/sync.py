"""Seconds of a weight sync: buckets, one by one as upstream does it, and the bare transport.

``python -m tests.bench.sync [--cell CELL] [--workers 1 2 4] [--json]`` on the built image: over loopback,
then between two containers over a link that ``tc`` limits (needs root and iproute2 on the host). The peers
are measured in turns with ours, in the same processes.
"""

import json
import subprocess
from collections.abc import Sequence
from typing import Any

import docker
from docker.models.containers import Container

from scripts.docker.client import connect, with_docker_errors
from scripts.errors import run
from scripts.matrix.load import find, load
from scripts.paths import ROOT
from scripts.testing.cluster import LABEL, owner_label, remove_on_exit
from scripts.testing.in_image import local_image
from tests.bench.results import Row, parser, show

INSIDE = "/opt/bench/sync_ranks.py"
RATE = 1_000_000_000  # bits a second of the limited link
SECONDS = 900


def started(client: docker.DockerClient, image: str, arguments: Sequence[str], **options: Any) -> Container:
    """A container that runs one end."""
    return client.containers.run(
        image,
        ["python", INSIDE, *arguments],
        volumes={str(ROOT / "tests" / "bench"): {"bind": "/opt/bench", "mode": "ro"}},
        labels={LABEL: owner_label()},
        shm_size=1 << 30,
        detach=True,
        **options,
    )


def answer(container: Container) -> dict[str, Any]:
    """What it printed, once it has ended."""
    code = container.wait(timeout=SECONDS)["StatusCode"]
    if code:
        raise RuntimeError(container.logs().decode(errors="replace")[-2000:])
    found: dict[str, Any] = json.loads(container.logs(stderr=False).decode().splitlines()[-1])
    return found


def loopback(client: docker.DockerClient, image: str, workers: int, repeat: int) -> dict[str, Any]:
    """Both ends in one container."""
    container = started(client, image, ["--workers", str(workers), "--repeat", str(repeat)])
    with remove_on_exit([container]):
        return answer(container)


def limited(client: docker.DockerClient, image: str, workers: int, repeat: int) -> dict[str, Any]:
    """The trainer in a container and all workers in another, with a limit on the trainer's way out."""
    network = client.networks.create("rlhf-stacks-bench-sync", labels={LABEL: owner_label()})
    made: list[Container] = []
    with remove_on_exit(made, [network]):
        idle = client.containers.create(image, ["sleep", str(SECONDS)], network=network.name)
        made.append(idle)
        idle.start()
        idle.reload()
        limit(idle)
        host = idle.attrs["NetworkSettings"]["Networks"][network.name]["IPAddress"]
        common = ["--workers", str(workers), "--repeat", str(repeat), "--host", host]
        made.append(started(client, image, common, network_mode=f"container:{idle.id}"))
        made.append(started(client, image, [*common, "--far"], network=network.name))
        return answer(made[1])


def limit(container: Container) -> None:
    """Let nothing leave the container faster than `RATE`."""
    enter = ["nsenter", "--net", "--target", str(container.attrs["State"]["Pid"])]
    rate = ["rate", f"{RATE}bit", "burst", "512kb", "latency", "100ms"]
    subprocess.run([*enter, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *rate], check=True)


def rows(where: str, workers: int, found: dict[str, Any], peers: Sequence[str]) -> list[Row]:
    """A row for each model and peer."""
    names = {"raw": "gloo broadcast", "upstream": "one by one", "plain": "plain stream"}
    return [
        Row(f"{model}, {where}, {workers} workers, against {names[peer]}", "s", times["ours"], times[peer])
        for model, times in found.items()
        for peer in peers
        if peer in times
    ]


def main() -> int:
    """The command line."""
    options = parser("sync", __doc__)
    options.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    options.add_argument("--repeat", type=int, default=5)
    asked = options.parse_args()
    client = connect()
    matrix = load()
    image = local_image(client, find(matrix, asked.cell or matrix.default))
    table: list[Row] = []
    for workers in asked.workers:
        near = loopback(client, image, workers, asked.repeat)
        table += rows("loopback", workers, near, ("raw", "upstream"))
        far = limited(client, image, workers, asked.repeat)
        table += rows(f"{RATE / 1e9:g} Gbit/s", workers, far, ("plain", "raw"))
    notes = [
        "one by one: for each parameter a call to a Ray actor and a broadcast; upstream's goes by vLLM too",
        "plain stream: the same bytes through one socket to one worker",
    ]
    show(table, notes, asked.json, "peer")
    return 0


if __name__ == "__main__":
    run(with_docker_errors(main))
