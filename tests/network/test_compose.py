"""images/examples/compose.yaml, if compose is installed: two services form one cluster."""

import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.matrix.load import Cell
from scripts.paths import ROOT
from scripts.testing.cluster import SHARES_AT_START

FILE = ROOT / "images" / "examples" / "compose.yaml"
SERVICES = ("head", "node")
SECONDS = 240
Compose = Callable[..., "subprocess.CompletedProcess[str]"]


def installed() -> list[str]:
    """Return the command: Docker's plugin, or Debian's separate program; empty if neither is installed."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if plugin.returncode == 0:
        return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else []


@pytest.fixture
def compose(cell: Cell, tmp_path: Path) -> Iterator[Compose]:
    """Return a function that runs compose on the file, as a separate project that is removed afterwards.

    Its services have priority for CPU time, as the nodes of a `Cluster` have while they start.
    """
    command = installed()
    if not command:
        pytest.skip("neither `docker compose` nor docker-compose is installed")
    shares = tmp_path / "shares.json"
    shares.write_text(json.dumps({"services": {name: {"cpu_shares": SHARES_AT_START} for name in SERVICES}}))
    project = ["-f", str(FILE), "-f", str(shares), "-p", f"rlhf-stacks-{secrets.token_hex(4)}"]
    environment = os.environ | {"RLHF_STACKS": cell.tag, "RAY_AUTH_TOKEN": secrets.token_hex(32)}

    def run(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*command, *project, *arguments],
            env=environment | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )

    yield run
    ended = run("down", "--volumes")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.timeout(SECONDS)
def test_a_secret_is_required(compose: Compose) -> None:
    done = compose("config", RAY_AUTH_TOKEN="")
    assert done.returncode != 0
    assert "a secret that both services have" in done.stderr


@pytest.mark.timeout(2 * SECONDS)
def test_two_services_form_a_cluster_that_runs_jobs(compose: Compose) -> None:
    up = compose("up", "-d")
    assert up.returncode == 0, up.stderr
    nodes = [
        "python",
        "-m",
        "rlhf_stack.cluster.readiness",
        "--nodes",
        "2",
        "--gpus",
        "4",
        "--timeout",
        "120",
    ]
    ready = compose("exec", "-T", "head", *nodes)
    assert ready.returncode == 0, ready.stderr + compose("logs").stdout[-3000:]
    assert len(json.loads(ready.stdout)) == 2
    job = compose("exec", "-T", "head", "rlhf-stack", "submit", "--", "echo", "from the job")
    assert job.returncode == 0, job.stderr
    assert "from the job" in job.stdout
