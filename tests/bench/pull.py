"""Transfer of the pull of a second cell when the first is present: only the layers that they do not share.

``python -m tests.bench.pull [--first CELL] [--cell CELL] [--json]``; about ten minutes, as root.

Both images are pushed to a registry on this machine. A separate, empty Docker Engine pulls the first and
then the second. Measured are the bytes of blobs that the registry sent, from its log, and the seconds of a
pull, including unpacking. The comparison is the size of the whole second image, from its manifest, and the
seconds of the first pull, which shared nothing. The default of ``--first`` is the built cell that shares most
layers with the second.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import docker
from docker.models.images import Image
from rich.console import Console

from scripts.docker.client import check_space, connect, with_docker_errors
from scripts.docker.registry import inspect_remote
from scripts.errors import UserError, run
from scripts.images.build import unpacked_size
from scripts.matrix.load import Cell, expand, find, load
from scripts.paths import ROOT
from scripts.release import catalogue, publish
from tests.bench.results import Row, parser, show
from tests.registry import server

BRIDGE = "rlhf-bench"
START_SECONDS = 60
PULL_SECONDS = 1800


def shared_layers(one: Image, other: Image) -> int:
    """Return how many layers two images share."""
    return len(set(one.attrs["RootFS"]["Layers"]) & set(other.attrs["RootFS"]["Layers"]))


def partner(cell: Cell, images: Mapping[str, Image]) -> str:
    """Return the built cell that shares most layers with ``cell``; `UserError` if no other is built."""
    others = [name for name in images if name != cell.id]
    if not others:
        raise UserError("this needs the images of two cells, and only one is built")
    return max(others, key=lambda name: shared_layers(images[name], images[cell.id]))


@contextmanager
def second_docker(folder: Path) -> Iterator[docker.DockerClient]:
    """Run a second Docker Engine, which keeps everything in ``folder`` and runs no container.

    It gets its own bridge: without one it would remove ``docker0``, which belongs to the first.
    """
    socket, log = folder / "engine.sock", folder / "engine.log"
    command = [
        "dockerd",
        f"--host=unix://{socket}",
        f"--data-root={folder / 'data'}",
        f"--exec-root={folder / 'exec'}",
        f"--pidfile={folder / 'pid'}",
        f"--bridge={BRIDGE}",
        "--iptables=false",
    ]
    folder.mkdir()
    subprocess.run(["ip", "link", "add", BRIDGE, "type", "bridge"], check=True)
    subprocess.run(["ip", "address", "add", "192.0.2.1/30", "dev", BRIDGE], check=True)
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not socket.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        if not socket.exists():
            raise UserError(
                f"the second Docker Engine did not start: {log.read_text(encoding='utf-8').splitlines()[-1]}"
            )
        yield docker.DockerClient(base_url=f"unix://{socket}", timeout=PULL_SECONDS)
    finally:
        process.terminate()
        process.wait()
        subprocess.run(["ip", "link", "delete", BRIDGE], check=True)


def pulled(client: docker.DockerClient, row: publish.Row, registry: server.Registry) -> tuple[float, float]:
    """Pull a pushed image by its digest; return the megabytes that the registry sent, and the seconds."""
    print(f"pulling {row.reference} ...", file=sys.stderr, flush=True)
    before = sum(registry.served().values())
    start = time.monotonic()
    client.images.pull(row.reference.rpartition(":")[0], tag=row.digest)
    seconds = time.monotonic() - start
    return (sum(registry.served().values()) - before) / 1e6, seconds


def main() -> int:
    """Run the command line."""
    options = parser("pull", __doc__)
    options.add_argument("--first", metavar="CELL", help="the cell that is pulled first")
    arguments = options.parse_args()
    if os.geteuid():
        raise UserError("this starts a second Docker Engine: run it as root")
    matrix, client = load(), connect(publish.PUSH_SECONDS)
    cells = expand(matrix)
    second = find(matrix, arguments.cell or matrix.default)
    images = catalogue.images(client, cells)
    first = find(matrix, arguments.first or partner(second, images))
    if absent := [cell.id for cell in (first, second) if cell.id not in images]:
        raise UserError(f"{absent[0]} is not built")
    need = sum(unpacked_size(images[cell.id]) for cell in (first, second)) // 10**6
    check_space(ROOT, need, shutil.disk_usage(ROOT).free)
    with tempfile.TemporaryDirectory(dir=ROOT / "build", prefix="pull-") as temporary:
        folder = Path(temporary)
        with server.running(folder / "registry") as registry:
            rows = [push(client, images[cell.id], registry, cell) for cell in (first, second)]
            packed = whole(client, rows[1])
            with second_docker(folder / "engine") as other:
                _, first_seconds = pulled(other, rows[0], registry)
                moved, seconds = pulled(other, rows[1], registry)
    measured = [
        Row("transferred by the pull", "MB", moved, packed),
        Row("pull, including unpacking", "s", seconds, first_seconds),
    ]
    notes = [
        f"{second.id}, pulled after {first.id}",
        "compressed bytes of layers and configuration, from the registry's log; one machine, no network",
        "empty Docker: the size of the whole image, from its manifest; the seconds of the first pull",
    ]
    show(measured, notes, arguments.json, "empty Docker")
    return 0


def push(client: docker.DockerClient, image: Image, registry: server.Registry, cell: Cell) -> publish.Row:
    """Push an image as `publish` does."""
    return publish.push(client, image, f"{registry.host}/bench", cell.id, Console(stderr=True))


def whole(client: docker.DockerClient, row: publish.Row) -> float:
    """Return the compressed size of all layers of a pushed image, in megabytes."""
    remote = inspect_remote(client, row.reference)
    return sum(layer for _, layer in remote.layers) / 1e6 if remote else 0.0


if __name__ == "__main__":
    run(with_docker_errors(main))
