"""A user's day on two machines: start, plan, check the network, submit, watch, and clean up after a dead run.

``rlhf-stack start`` starts the nodes, and all commands run on the head. With a Ray that supports tokens the
nodes share one, as machines with the same RAY_AUTH_TOKEN do.
"""

import json
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import docker
import pytest
from docker.models.containers import Container
from rlhf_stack.demo import tiny_run

from scripts.matrix.load import Cell
from scripts.testing import demo, demo_report
from scripts.testing.cluster import Cluster, ContainerNode
from tests.network import diagnosis
from tests.network.waiting import until

# Long enough to be observed: on a busy machine Ray exported metrics after 17 s. On an idle one a step takes
# 0.3 s with OpenRLHF 0.5, and more than 1 s with 0.11.
STEPS = {(0, 5): 120, (0, 11): 40}
SECONDS = 900  # for what takes one minute on an idle machine
LAYOUT = "separate"
SHORT = {"RAY_metrics_report_interval_ms": "500"}  # the maximum age of what top shows
SETTINGS = {"RLHF_STACK_EVENTS": demo.EVENTS, "RLHF_STACK_VERIFY_SYNC": "1"}
KILL_THE_DRIVER = """
import os, signal
from rlhf_stack.cleanup import process_table
processes = process_table.snapshot()
drivers = [one for one in processes if one.role == process_table.DRIVER and "train_ppo_ray" in one.line]
for driver in drivers:
    os.kill(driver.pid, signal.SIGKILL)
"""


def start(node: ContainerNode, head: str | None) -> list[str]:
    """Return the command that a user runs on each machine."""
    role = ["--head", "--expect-nodes", str(len(demo.NODES))] if head is None else ["--join", head]
    return [
        "rlhf-stack",
        "start",
        *role,
        "--num-gpus",
        str(node.gpus),
        "--num-cpus",
        str(node.cpus),
        "--block",
    ]


@pytest.fixture(scope="module")
def steps(cell: Cell) -> int:
    """Return the number of steps of the run."""
    return STEPS[tiny_run.installed(cell.versions["openrlhf"]).since]


@pytest.fixture(scope="module")
def cluster(client: docker.DockerClient, cell: Cell, steps: int) -> Iterator[Cluster]:
    """Start two nodes for all tests of this file, with the tiny model on both."""
    environment = SHORT | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with Cluster(client, cell.tag, demo.NODES, environment, start=start) as running:
        demo.prepare(running, steps, seed=0)
        yield running


@pytest.fixture(scope="module")
def run(cluster: Cluster, steps: int) -> list[str]:
    """Return the command line of a run that fits on the cluster."""
    return demo.command(cluster, LAYOUT, steps, seed=0)


def run_json(container: Container, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code and JSON of an ``rlhf-stack`` command on a node."""
    command = ["docker", "exec", str(container.id), "rlhf-stack", arguments[0], "--json", *arguments[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.stdout, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, result


def submit(run: Sequence[str]) -> list[str]:
    """Return the submit command on the head: RLHF_STACK_* variables and those of --env go with the job."""
    variables = [f"{name}={value}" for name, value in SETTINGS.items()]
    return ["env", *variables, "rlhf-stack", "submit", "--env", "HF_HUB_OFFLINE=1", "--", *run]


def has(events: Sequence[dict[str, Any]], **fields: Any) -> bool:
    """Return whether an event has these fields."""
    return any(fields.items() <= event.items() for event in events)


class Observer:
    """Runs `top` and then `doctor`, once the run has something to show."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._syncs = False
        self.top: dict[str, Any] = {}
        self.doctor: dict[str, Any] = {}

    def __call__(self) -> None:
        """Observe; called repeatedly during the run."""
        if not self._syncs:
            self._syncs = has(demo.events_of(self._cluster), event="sync")
        elif not self.top:
            _, shown = run_json(self._cluster.head, "top", "--events", demo.EVENTS)
            self.top = shown if any(one["tokens_per_second"] for one in shown["engines"]) else {}
        elif not self.doctor:
            _, self.doctor = run_json(self._cluster.head, "doctor", "--timeout", "120")


def once(holds: Callable[[], bool], act: Callable[[], object]) -> Callable[[], None]:
    """Return a function that calls ``act`` the first time that ``holds`` is true."""
    pending = [act]

    def tick() -> None:
        if pending and holds():
            pending.pop()()

    return tick


@pytest.mark.timeout(SECONDS)
def test_the_nodes_join_and_the_head_shows_them(cluster: Cluster) -> None:
    lines = [f"{node['address']}: {node['gpus']:g} GPUs" for node in cluster.addresses]
    until(lambda: all(line in cluster.logs()["head"] for line in lines), "both nodes in the head's log")


@pytest.mark.timeout(SECONDS)
def test_the_machines_are_certified(cluster: Cluster) -> None:
    """One rung, with the token of the nodes; test_certify.py has the others."""
    words = ("--out", "/tmp/certificate", "--rung", "network")
    code, printed = run_json(cluster.head, "certify", *words)
    assert (code, printed["passed"], printed["failed"]) == (0, 2, 0), printed["rungs"]


@pytest.mark.timeout(SECONDS)
def test_a_client_without_the_token_is_refused(cluster: Cluster, cell: Cell) -> None:
    alone = ["env", "-u", "RAY_AUTH_TOKEN", "HOME=/nowhere", "python", "-c"]
    known = cluster.output(
        cluster.head, [*alone, "from rlhf_stack.cluster import auth_token; print(auth_token.is_supported())"]
    )
    if known.strip() != "True":
        pytest.skip(f"Ray {cell.versions['ray']} does not support tokens")
    connect = "import ray; ray.init('auto', log_to_driver=False)"
    command = ["docker", "exec", str(cluster.containers[1].id), *alone, connect]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode != 0
    assert "InvalidAuthToken" in done.stderr


@pytest.mark.timeout(SECONDS)
def test_the_plan_reports_that_the_run_fits(cluster: Cluster, run: Sequence[str]) -> None:
    code, plan = run_json(cluster.head, "plan", "--ray", "auto", "--", *run)
    assert (code, plan["problems"]) == (0, [])
    assert {node["address"] for node in plan["nodes"]} == {node["address"] for node in cluster.addresses}


@pytest.mark.timeout(SECONDS)
def test_the_network_check_of_the_run_passes(cluster: Cluster, run: Sequence[str]) -> None:
    code, report = run_json(cluster.head, "check-network", "--size", "8", "--floor", "0.0001", "--", *run)
    assert (code, report["is_well"]) == (0, True)
    assert len(report["group"]["receivers"]) >= 2


@pytest.mark.timeout(SECONDS)
def test_the_run_trains_to_its_end_and_is_observed(
    cluster: Cluster, run: Sequence[str], cell: Cell, steps: int
) -> None:
    observer, output = Observer(cluster), list[str]()
    code = cluster.follow(submit(run), output.append, observer, timeout=SECONDS - 30)
    assert code == 0, "\n".join(output[-20:])
    result = demo_report.build(cell.id, cell.versions, cluster.addresses, demo.events_of(cluster), {})
    assert result["steps"] == steps
    assert result["weights_equal"]
    assert observer.top["sync"] > 0
    assert len(observer.top["engines"]) == len(result["engines"])
    assert diagnosis.errors(observer.doctor) == []
    assert diagnosis.addresses(observer.doctor) == {node["address"] for node in cluster.addresses}


@pytest.mark.timeout(SECONDS)
def test_reap_frees_all_that_a_killed_driver_left(cluster: Cluster, run: Sequence[str]) -> None:
    begun = time.time()

    def loads() -> bool:
        events = [event for event in demo.events_of(cluster) if event["time"] > begun]
        return has(events, event="engine start", step="model loaded")

    def kill() -> None:
        cluster.output(cluster.head, ["python", "-c", KILL_THE_DRIVER])

    assert cluster.follow(submit(run), lambda _: None, once(loads, kill), timeout=SECONDS - 30) != 0
    reap = ("reap", "--yes", "--older-than", "0")
    until(
        lambda: not any(run_json(node, *reap)[1]["left"] for node in cluster.containers),
        "nothing left to reap",
    )
    until(lambda: run_json(cluster.head, "plan", "--ray", "auto", "--", *run)[0] == 0, "free GPUs")
