"""Time until a Ray node is ready and until its programs start, compared with a plain `pip install` image.

``python -m tests.bench.ready [--cell CELL] [--repeat N] [--json]``; about five minutes. The plain image is
the one that ``tests.bench.build`` builds; without it, only ours is measured.

- *Ray node ready*: from creating the container to a head node that accepts jobs, by the same probe in both
  (``rlhf_stack.cluster.readiness``, mounted into the plain image), started by ``scripts.testing.cluster``.
- *import vllm*, *ray --version*: a complete `docker run`; *no bytecode* with the compiled files hidden, as
  with a read-only root filesystem that was built without them.

Each figure is the median of ``--repeat`` runs, ours and the peer's alternately, after an uncounted first run.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import docker

from scripts.docker.client import connect
from scripts.errors import UserError, run
from scripts.matrix.load import find, load
from scripts.paths import ROOT
from scripts.testing.cluster import LABEL, Cluster, ContainerNode, owner_label, remove_on_exit
from tests.bench.build import PEER
from tests.bench.results import Row, parser, show

RUNTIME = ROOT / "images" / "runtime"
MOUNTED = {"volumes": {str(RUNTIME): {"bind": "/opt/runtime", "mode": "ro"}}}
IN_PEER = {"PYTHONPATH": "/opt/runtime", "PYTHONDONTWRITEBYTECODE": "1"}
HIDDEN = {"PYTHONPYCACHEPREFIX": "/nowhere", "PYTHONDONTWRITEBYTECODE": "1"}
IMPORT = ("python", "-c", "import vllm")
VERSION = ("ray", "--version")
SECONDS = 600.0


def ready(
    client: docker.DockerClient, image: str, environment: Mapping[str, str], options: Mapping[str, Any]
) -> float:
    """Return the seconds until a head node accepts jobs."""
    start = time.monotonic()
    with Cluster(client, image, [ContainerNode("head", gpus=2)], environment, SECONDS, options):
        return time.monotonic() - start


def started(
    client: docker.DockerClient, image: str, command: tuple[str, ...], environment: Mapping[str, str]
) -> float:
    """Return the seconds of a `docker run` of ``command``."""
    container = client.containers.create(
        image, list(command), environment=dict(environment), labels={LABEL: owner_label()}
    )
    with remove_on_exit([container]):
        start = time.monotonic()
        container.start()
        code = container.wait(timeout=SECONDS)["StatusCode"]
        seconds = time.monotonic() - start
        if code:
            raise UserError(
                f"{' '.join(command)} failed in {image}: {container.logs(tail=1).decode().strip()}"
            )
    return seconds


def medians(sides: list[Callable[[], float]], repeat: int) -> list[float]:
    """Return the median of each side, measured alternately so that the machine's load affects all."""
    rounds = [[side() for side in sides] for _ in range(repeat + 1)]
    return [statistics.median(times) for times in zip(*rounds[1:], strict=True)]


def main() -> int:
    """Run the command line."""
    arguments = parser("ready", __doc__)
    arguments.add_argument("--repeat", type=int, default=3, metavar="N", help="runs of each (%(default)s)")
    options = arguments.parse_args()
    matrix = load()
    cell = find(matrix, options.cell or matrix.default)
    client = connect()
    if not client.images.list(name=cell.tag):
        raise UserError(f"{cell.tag} is not built: bash scripts/nox.sh -s build")
    images = [cell.tag, *([PEER] if client.images.list(name=PEER) else [])]
    settings = {setting.name: setting.value for setting in cell.env}
    extra: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
        cell.tag: ({}, {}),
        PEER: ({**settings, **IN_PEER}, MOUNTED),
    }
    measured: dict[str, list[Callable[[], float]]] = {
        "Ray node ready": [partial(ready, client, image, *extra[image]) for image in images]
    }
    for name, command in {"import vllm": IMPORT, "ray --version": VERSION}.items():
        for title, hidden in {name: {}, f"{name}, no bytecode": HIDDEN}.items():
            measured[title] = [
                partial(started, client, image, command, {**settings, **hidden}) for image in images
            ]
    rows = []
    for name, sides in measured.items():
        print(name, "...", file=sys.stderr, flush=True)
        rows.append(Row(name, "s", *medians(sides, options.repeat)))
    notes = [f"medians of {options.repeat} runs of each, alternately"]
    if len(images) == 1:
        notes.append(f"{PEER} is absent: python -m tests.bench.build builds it")
    show(rows, notes, options.json)
    return 0


if __name__ == "__main__":
    run(main)
