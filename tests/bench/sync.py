"""Seconds of a weight sync: in buckets, one by one as in upstream, and the bare transport.

``python -m tests.bench.sync [--cell CELL] [--workers 1 2 4] [--json]`` on the built image: over loopback,
then between two containers over a link that ``tc`` limits (needs root and iproute2 on the host). Ours and the
peers are measured alternately, in the same processes.
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
    """Start a container that runs one end."""
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
    """Wait until a container has ended; return the JSON that it printed."""
    code = container.wait(timeout=SECONDS)["StatusCode"]
    if code:
        raise RuntimeError(container.logs().decode(errors="replace")[-2000:])
    found: dict[str, Any] = json.loads(container.logs(stderr=False).decode().splitlines()[-1])
    return found


def loopback(client: docker.DockerClient, image: str, workers: int, repeat: int) -> dict[str, Any]:
    """Measure with both ends in one container."""
    container = started(client, image, ["--workers", str(workers), "--repeat", str(repeat)])
    with remove_on_exit([container]):
        return answer(container)


def limited(client: docker.DockerClient, image: str, workers: int, repeat: int) -> dict[str, Any]:
    """Measure with the trainer and the workers in two containers, and a limit on what the trainer sends."""
    network = client.networks.create("rlhf-stacks-bench-sync", labels={LABEL: owner_label()})
    containers: list[Container] = []
    with remove_on_exit(containers, [network]):
        idle = client.containers.create(image, ["sleep", str(SECONDS)], network=network.name)
        containers.append(idle)
        idle.start()
        idle.reload()
        limit(idle)
        host = idle.attrs["NetworkSettings"]["Networks"][network.name]["IPAddress"]
        common = ["--workers", str(workers), "--repeat", str(repeat), "--host", host]
        containers.append(started(client, image, common, network_mode=f"container:{idle.id}"))
        containers.append(started(client, image, [*common, "--far"], network=network.name))
        return answer(containers[1])


def limit(container: Container) -> None:
    """Limit what the container sends to `RATE`."""
    enter = ["nsenter", "--net", "--target", str(container.attrs["State"]["Pid"])]
    rate = ["rate", f"{RATE}bit", "burst", "512kb", "latency", "100ms"]
    subprocess.run([*enter, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *rate], check=True)


def rows(where: str, workers: int, found: dict[str, Any], peers: Sequence[str]) -> list[Row]:
    """Return a row for each model and peer."""
    names = {"raw": "gloo broadcast", "upstream": "one by one", "plain": "plain stream"}
    return [
        Row(f"{model}, {where}, {workers} workers, against {names[peer]}", "s", times["ours"], times[peer])
        for model, times in found.items()
        for peer in peers
        if peer in times
    ]


def main() -> int:
    """Run the command line."""
    options = parser("sync", __doc__)
    options.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    options.add_argument("--repeat", type=int, default=5)
    arguments = options.parse_args()
    client = connect()
    matrix = load()
    image = local_image(client, find(matrix, arguments.cell or matrix.default))
    table: list[Row] = []
    for workers in arguments.workers:
        near = loopback(client, image, workers, arguments.repeat)
        table += rows("loopback", workers, near, ("raw", "upstream"))
        far = limited(client, image, workers, arguments.repeat)
        table += rows(f"{RATE / 1e9:g} Gbit/s", workers, far, ("plain", "raw"))
    notes = [
        "one by one: per parameter a call to a Ray actor and a broadcast; upstream also goes through vLLM",
        "plain stream: the same bytes through one socket to one worker",
    ]
    show(table, notes, arguments.json, "peer")
    return 0


if __name__ == "__main__":
    run(with_docker_errors(main))
