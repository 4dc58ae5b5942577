"""Wait, with a deadline, until a Ray cluster has the nodes and GPUs that a job needs.

``python -m rlhf_stack.cluster.readiness --nodes 2 --gpus 4`` prints the nodes as JSON when all have joined
and jobs can be submitted. At the deadline it prints one line that names what is missing and exits with 1.
"""

import argparse
import json
import os
import sys
import time
import urllib.error
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rlhf_stack.cluster import auth_token
from rlhf_stack.cluster.connect import connect, off_stdout
from rlhf_stack.cluster.direct import open_directly
from rlhf_stack.cluster.host import endpoint
from rlhf_stack.cluster.start_command import LOOPBACK
from rlhf_stack.errors import UserError
from rlhf_stack.lazy import ray

POLL_SECONDS = 0.2
DASHBOARD_PORT = 8265
DASHBOARD = f"http://{LOOPBACK}:{DASHBOARD_PORT}"
EVERY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104  (compared, never bound)
TOKEN_REQUIRED = (401, 403)  # HTTP codes of a server that is up


@dataclass(frozen=True)
class RayNode:
    """A live Ray node; ``gpus`` and ``cpus`` as declared to Ray, simulated or not."""

    address: str
    host: str
    gpus: float
    cpus: float
    is_head: bool


class NotReadyError(RuntimeError):
    """The cluster was not ready in time; the message names what is missing and the seconds waited."""


def parse_nodes(table: list[dict[str, Any]]) -> list[RayNode]:
    """Return the live nodes in the result of ``ray.nodes()``: the head first, then ordered by address.

    Nodes with the same address count once: Ray lists a restarted machine twice until the old node times out.
    """
    nodes = [
        RayNode(
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


def describe_missing(found: list[RayNode], nodes: int, gpus: float) -> str:
    """Describe what ``found`` lacks of ``nodes`` nodes and ``gpus`` GPUs; empty if nothing."""
    total = sum(node.gpus for node in found)
    missing = []
    if len(found) < nodes:
        joined = ", ".join(node.address for node in found) or "none"
        missing.append(f"{len(found)} of {nodes} nodes joined ({joined})")
    if total < gpus:
        missing.append(f"{total:g} of {gpus:g} GPUs")
    return ", ".join(missing)


def _poll(deadline: float, attempt: Callable[[], str]) -> None:
    """Repeat ``attempt`` until it returns "", otherwise the reason why it is not ready."""
    start = time.monotonic()
    while reason := attempt():
        if time.monotonic() >= deadline:
            raise NotReadyError(f"{reason} (waited {time.monotonic() - start:.0f} s)")
        time.sleep(POLL_SECONDS)


def _connect() -> str:
    try:
        connect()
    except UserError as error:
        return str(error)
    return ""


def job_server(dashboard: str) -> str:
    """Return the URL, for this machine, of the job server of a dashboard that listens on ``dashboard``."""
    return DASHBOARD if dashboard in EVERY_ADDRESS else f"http://{endpoint(dashboard, DASHBOARD_PORT)}"


def _answers(server: str) -> str:
    try:
        with open_directly(f"{server}/api/jobs/", 5.0):
            return ""
    except urllib.error.HTTPError as error:
        return "" if error.code in TOKEN_REQUIRED else f"Ray's job server at {server} fails ({error})"
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        return f"Ray's job server at {server} does not answer ({error})"


def wait_for_nodes(
    nodes: int,
    gpus: float,
    timeout: float,
    server: str | None = DASHBOARD,
    check: Callable[[], None] = lambda: None,
) -> list[RayNode]:
    """Wait until ``nodes`` nodes with ``gpus`` GPUs have joined and jobs can be submitted to ``server``.

    ``server`` is the address of Ray's job server, None if it is not awaited. ``check`` is called at each poll
    and may raise to end the wait. Raises `NotReadyError` after ``timeout`` seconds.
    """

    def connection() -> str:
        check()
        return _connect()

    def members() -> str:
        check()
        return describe_missing(parse_nodes(ray.nodes()), nodes, gpus)

    deadline = time.monotonic() + timeout
    with off_stdout():
        _poll(deadline, connection)
        try:
            _poll(deadline, members)
            if server:
                _poll(deadline, lambda: _answers(server))
            return parse_nodes(ray.nodes())
        finally:
            ray.shutdown()


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m rlhf_stack.cluster.readiness", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--nodes", type=int, required=True, help="number of nodes, including the head")
    parser.add_argument("--gpus", type=float, required=True, help="number of GPUs of all nodes together")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS")
    options = parser.parse_args()
    os.environ.update(auth_token.client_environment(os.environ))  # Ray reads it at import
    try:
        nodes = wait_for_nodes(options.nodes, options.gpus, options.timeout)
    except NotReadyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps([asdict(node) for node in nodes]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
