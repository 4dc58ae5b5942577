"""Estimates of rlhf_stack.memory compared with what torch, DeepSpeed and vLLM allocate for small models.

``python -m tests.bench.memory [--cell CELL] [--kind KIND] [--json]``; some minutes, in a container of the
cell. *ours* is the estimate; a ratio of 1.02 means that 2 % more was allocated. ``tests/image/measured.py``
measures, and ``tests/image/test_memory.py`` checks the same figures against limits.
"""

import json
from typing import Any

import docker

from scripts.docker.client import connect, with_docker_errors
from scripts.errors import UserError, run
from scripts.matrix.load import find, load
from scripts.paths import ROOT
from scripts.testing.cluster import LABEL, owner_label, remove_on_exit
from scripts.testing.in_image import local_image
from tests.bench.results import Row, parser, show

KINDS = ("activations", "states", "cache")
SECONDS = 1500.0
MEGABYTE = 1e6


def measured(client: docker.DockerClient, image: str, kind: str) -> list[dict[str, Any]]:
    """Return the rows of one kind, measured in a container of ``image``."""
    container = client.containers.create(
        image,
        ["python", "/opt/tests/image/measured.py", kind],
        environment={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        volumes={str(ROOT / "tests"): {"bind": "/opt/tests", "mode": "ro"}},
        labels={LABEL: owner_label()},
        shm_size=1 << 30,
        working_dir="/tmp",
    )
    with remove_on_exit([container]):
        container.start()
        code = container.wait(timeout=SECONDS)["StatusCode"]
        output = container.logs(stdout=True, stderr=False).decode()
        if code:
            raise UserError(f"{kind} in {image}: {container.logs(tail=1).decode(errors='replace').strip()}")
    rows: list[dict[str, Any]] = json.loads(output.splitlines()[-1])
    return rows


def main() -> int:
    """Run the command line."""
    arguments = parser("memory", __doc__)
    arguments.add_argument(
        "--kind", choices=KINDS, action="append", help="measure only this kind; repeatable"
    )
    options = arguments.parse_args()
    matrix = load()
    cell = find(matrix, options.cell or matrix.default)
    client = connect()
    image = local_image(client, cell)
    found = [one for kind in options.kind or KINDS for one in measured(client, image, kind)]
    rows = [
        Row(str(one["name"]), "MB", one["estimated"] / MEGABYTE, one["measured"] / MEGABYTE) for one in found
    ]
    worst = max(rows, key=lambda row: abs((row.ratio or 1) - 1))
    note = f"{cell.id}: at most {abs((worst.ratio or 1) - 1):.1%} off ({worst.name})"
    show(rows, [note], options.json, "allocated")
    return 0


if __name__ == "__main__":
    run(with_docker_errors(main))
