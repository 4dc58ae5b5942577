"""Wait, with a deadline, until a Ray cluster has the nodes and GPUs that a job needs.

``python -m rlhf_stack.cluster.readiness --nodes 2 --gpus 4`` prints the nodes as JSON once they are there and jobs can be
submitted; exit code 1 and one line that says what is missing if they are not in time.
"""

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rlhf_stack.cluster import auth_token
from rlhf_stack.cluster.connect import connect
from rlhf_stack.errors import UserError

POLL_SECONDS = 0.2
DASHBOARD = "http://127.0.0.1:8265"
ASKS_FOR_A_TOKEN = (401, 403)  # so it is there


@dataclass(frozen=True)
class Node:
    """One Ray node that is alive; ``gpus`` and ``cpus`` as Ray was told, fake or not."""

    address: str
    host: str
    gpus: float
    cpus: float
    is_head: bool


class NotReadyError(RuntimeError):
    """What is missing, and since when it is waited for."""


def parse(table: list[dict[str, Any]]) -> list[Node]:
    """The living nodes in what ``ray.nodes()`` returns, the head first, then by address.

    A machine that was started again is one, though Ray has two of it until it finds the old one dead.
    """
    nodes = [
        Node(
            address=entry["NodeManagerAddress"],
            host=entry["NodeManagerHostname"],
            gpus=entry["Resources"].get("GPU", 0.0),
            cpus=entry["Resources"].get("CPU", 0.0),
            is_head="node:__internal_head__" in entry["Resources"],
        )
        for entry in table
        if entry["Alive"]
    ]
    machines = {node.address: node for node in nodes}.values()
    return sorted(machines, key=lambda node: (not node.is_head, node.address))


def missing(found: list[Node], nodes: int, gpus: float) -> str:
    """What ``found`` lacks of the ``nodes`` and ``gpus`` that are wanted; empty if nothing."""
    total = sum(node.gpus for node in found)
    lacks = []
    if len(found) < nodes:
        lacks.append(
            f"{len(found)} of {nodes} nodes joined ({', '.join(node.address for node in found) or 'none'})"
        )
    if total < gpus:
        lacks.append(f"{total:g} of {gpus:g} GPUs")
    return ", ".join(lacks)


def _until(deadline: float, attempt: Callable[[], str]) -> None:
    """Repeat ``attempt`` until it returns "", which it explains otherwise."""
    start = time.monotonic()
    while lack := attempt():
        if time.monotonic() >= deadline:
            raise NotReadyError(f"{lack} (waited {time.monotonic() - start:.0f} s)")
        time.sleep(POLL_SECONDS)


def _connect() -> str:
    try:
        connect()
    except UserError as problem:
        return str(problem)
    return ""


def _dashboard() -> str:
    try:
        with urllib.request.urlopen(f"{DASHBOARD}/api/jobs/", timeout=5):  # noqa: S310  (the scheme is http)
            return ""
    except urllib.error.HTTPError as error:
        return "" if error.code in ASKS_FOR_A_TOKEN else f"Ray's job server at {DASHBOARD} fails ({error})"
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        return f"Ray's job server at {DASHBOARD} does not answer ({error})"


def wait(
    nodes: int, gpus: float, timeout: float, jobs: bool = True, check: Callable[[], None] = lambda: None
) -> list[Node]:
    """The nodes, once ``nodes`` of them and ``gpus`` are there and, if ``jobs``, jobs can be submitted.

    ``timeout`` in seconds; `NotReadyError` says what is missing. ``check`` is called each time, to raise what
    ends the wait before. Jobs can be submitted on the head alone.
    """
    import ray

    def begun() -> str:
        check()
        return _connect()

    def there() -> str:
        check()
        return missing(parse(ray.nodes()), nodes, gpus)

    deadline = time.monotonic() + timeout
    _until(deadline, begun)
    try:
        _until(deadline, there)
        if jobs:
            _until(deadline, _dashboard)
        return parse(ray.nodes())
    finally:
        ray.shutdown()


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m rlhf_stack.cluster.readiness", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--nodes", type=int, required=True, help="how many nodes, the head included")
    parser.add_argument("--gpus", type=float, required=True, help="how many GPUs in all")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS")
    options = parser.parse_args()
    os.environ.update(auth_token.use(os.environ))  # Ray reads it when it is imported
    try:
        nodes = wait(options.nodes, options.gpus, options.timeout)
    except NotReadyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps([asdict(node) for node in nodes]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
