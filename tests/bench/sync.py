"""Seconds of a weight sync: all weights, changed elements, one by one as in upstream, and the bare transport.

``python -m tests.bench.sync [--cell CELL] [--workers 1 2 4] [--json]`` on the built image: over loopback,
then between two containers over links that ``tc`` limits (needs root and iproute2 on the host). Ours and the
peers are measured alternately, in the same processes, with the growth of their memory.
"""

import json
import os
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
from tests.network import links

INSIDE = "/opt/bench/sync_ranks.py"
NEAR = ("0.5B", "LoRA")
LINKS = {1000: "0.5B", 100: "four layers"}  # the model by 10^6 bit/s of the link
SECONDS = 1800


def started(
    client: docker.DockerClient, image: str, arguments: Sequence[str], program: str = INSIDE, **options: Any
) -> Container:
    """Start a container that runs one end, by ``program``."""
    return client.containers.run(
        image,
        ["python", program, *arguments],
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
    arguments = ["--workers", str(workers), "--repeat", str(repeat), "--models", *NEAR]
    container = started(client, image, arguments)
    with remove_on_exit([container]):
        return answer(container)


def limited(
    client: docker.DockerClient, image: str, workers: int, repeat: int, megabits: int
) -> dict[str, Any]:
    """Measure with the trainer and the workers in two containers, and a limit on what the trainer sends."""
    network = client.networks.create(f"rlhf-stacks-bench-sync-{os.getpid()}", labels={LABEL: owner_label()})
    containers: list[Container] = []
    with remove_on_exit(containers, [network]):
        idle = client.containers.create(image, ["sleep", str(SECONDS)], network=network.name)
        containers.append(idle)
        idle.start()
        links.slow_down(idle, megabits)
        host = idle.attrs["NetworkSettings"]["Networks"][network.name]["IPAddress"]
        common = ["--workers", str(workers), "--repeat", str(repeat), "--host", host]
        common += ["--models", LINKS[megabits]]
        containers.append(started(client, image, common, network_mode=f"container:{idle.id}"))
        containers.append(started(client, image, [*common, "--far"], network=network.name))
        return answer(containers[1])


PEERS = {
    "raw": "a gloo broadcast",
    "upstream": "one by one",
    "one_by_one": "one by one",
    "plain": "a plain stream",
    "full": "all weights",
}


def rows(where: str, workers: int, found: dict[str, Any]) -> list[Row]:
    """Return rows for each model: its syncs against each peer, the bytes sent and the peaks of memory."""
    table = []
    for model, measured in found.items():
        title, seconds, size = f"{model}, {where}, {workers} workers", measured["seconds"], measured["bytes"]
        for peer in (peer for peer in PEERS if peer in seconds):
            for ours, text in (("full", "all weights"), ("changed", "changes")):
                if peer != ours:
                    name = f"{title}: {text} against {PEERS[peer]}"
                    table.append(Row(name, "s", seconds[ours], seconds[peer]))
        if "sharded" in seconds:
            name = f"{title} of one engine: each copies its shard, against all"
            table.append(Row(name, "s", seconds["sharded"], seconds["whole"]))
            name = f"{title} of one engine: bytes that one copies, of all"
            table.append(Row(name, "MB", measured["copied"] / 1e6, size / 1e6))
        table.append(Row(f"{title}: all weights, which are kept", "s", seconds["kept"]))
        table.append(Row(f"{title}: bytes of changes, of all", "MB", measured["sent"] / 1e6, size / 1e6))
        for method, peaks in sorted(measured["peaks"].items()):
            if peaks:  # those of upstream and over a link are not measured
                name = f"{title}: memory of the trainer, of a worker, {method}"
                table.append(Row(name, "MB", peaks[0] / 1e6, max(peaks[1:]) / 1e6))
    return table


def main() -> int:
    """Run the command line."""
    options = parser("sync", __doc__)
    options.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    options.add_argument("--repeat", type=int, default=3)
    options.add_argument("--links", type=int, nargs="*", default=list(LINKS), choices=LINKS)
    arguments = options.parse_args()
    client = connect()
    matrix = load()
    image = local_image(client, find(matrix, arguments.cell or matrix.default))
    table: list[Row] = []
    for workers in arguments.workers:
        table += rows("loopback", workers, loopback(client, image, workers, arguments.repeat))
        for megabits in arguments.links:
            far = limited(client, image, workers, max(1, arguments.repeat // 2), megabits)
            table += rows(f"{megabits} Mbit/s", workers, far)
    notes = [
        "one by one: per parameter a broadcast, and a call to a Ray actor over loopback; upstream also goes "
        "through vLLM",
        "plain stream: the same bytes through one socket to one worker",
    ]
    show(table, notes, arguments.json, "peer")
    return 0


if __name__ == "__main__":
    run(with_docker_errors(main))
