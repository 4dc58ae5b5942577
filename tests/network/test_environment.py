"""The value of a variable in a Ray worker on the second machine, however it was set."""

import json
from collections.abc import Callable, Sequence

import pytest

from scripts.matrix.load import Cell
from scripts.testing.cluster import Cluster
from scripts.testing.demo import SUBMIT
from tests.network.waiting import TEST_SECONDS

SCRIPT = "/tmp/report.py"
REPORT = """
import json, os, sys, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
ray.init(address="auto", log_to_driver=False)

@ray.remote(num_cpus=0)
def report(names):
    return {name: os.environ.get(name) for name in names}

answers = {}
for node in ray.nodes():
    there = report.options(scheduling_strategy=On(node["NodeID"], soft=False))
    answers[node["NodeManagerHostname"]] = there.remote(sys.argv[1:])
print("seen", json.dumps({host: ray.get(answer, timeout=60) for host, answer in answers.items()}))
"""
OWN, JOB = "3", "5"


@pytest.fixture
def names(cell: Cell) -> list[str]:
    """Return the cell's variables, Ray's own last: the tests set the first ones to values invalid for Ray."""
    return sorted((item.name for item in cell.env), key=lambda name: name.startswith("RAY_"))


@pytest.fixture
def defaults(cell: Cell) -> dict[str, str]:
    """Return each variable's value in the matrix."""
    return {item.name: item.value for item in cell.env}


def on_second_node(cluster: Cluster, command: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Return the variables ``names`` of a worker there when ``command`` runs `REPORT` on the head."""
    write = ["sh", "-c", f"cat >{SCRIPT} <<'END'\n{REPORT}\nEND"]
    cluster.output(cluster.head, write)
    output = cluster.output(cluster.head, [*command, "python", SCRIPT, *names])
    line = next(line for line in output.splitlines() if line.startswith("seen "))
    answers: dict[str, dict[str, str]] = json.loads(line.removeprefix("seen "))
    assert set(answers) == {"head", "worker"}
    return answers["worker"]


def submit(environment: dict[str, str] | None = None) -> list[str]:
    """Return a `ray job submit` command, with variables in its ``runtime_env``."""
    runtime_env = [f"--runtime-env-json={json.dumps({'env_vars': environment})}"] if environment else []
    return [*SUBMIT, *runtime_env, "--"]


@pytest.mark.timeout(TEST_SECONDS)
def test_defaults_reach_the_second_node(
    start: Callable[..., Cluster], names: list[str], defaults: dict[str, str]
) -> None:
    """The defaults apply without our entrypoint's shell and in a job, whose runtime_env overrides them."""
    cluster = start()
    changed = names[0]
    assert on_second_node(cluster, [], names) == defaults
    assert on_second_node(cluster, submit(), names) == defaults
    of_job = on_second_node(cluster, submit({changed: JOB}), names)
    assert of_job == defaults | {changed: JOB}


@pytest.mark.timeout(TEST_SECONDS)
def test_a_user_s_own_value_reaches_the_second_node(
    start: Callable[..., Cluster], cell: Cell, names: list[str], defaults: dict[str, str]
) -> None:
    """`docker run -e` overrides the default, and the node's log reports it.

    A variable of the submitting shell does not reach the cluster; one of the runtime_env does.
    """
    own, other = names[:2]
    cluster = start(**{own: OWN})
    expected = defaults | {own: OWN}
    assert on_second_node(cluster, [], names) == expected
    assert on_second_node(cluster, submit(), names) == expected
    assert on_second_node(cluster, ["env", f"{other}={JOB}", *submit()], names) == expected
    of_job = on_second_node(cluster, submit({own: JOB}), names)
    assert of_job == expected | {own: JOB}
    reason = next(" ".join(item.reason.split()) for item in cell.env if item.name == own)
    for log in cluster.logs().values():
        assert f"rlhf-stack: {own}={OWN} (default {defaults[own]}: {reason})" in log


@pytest.mark.timeout(TEST_SECONDS)
def test_a_profile_reaches_the_second_node(
    start: Callable[..., Cluster], cell: Cell, names: list[str], defaults: dict[str, str]
) -> None:
    """One variable of the container selects it."""
    if not cell.accelerator.profiles:
        pytest.skip("the matrix has no profile for this accelerator")
    profile = cell.accelerator.profiles[0]
    expected = {item.name: item.value for item in profile.env}
    cluster = start(RLHF_STACK_PROFILE=profile.name)
    both = [*names, *expected]
    assert on_second_node(cluster, [], both) == defaults | expected
    assert on_second_node(cluster, submit(), both) == defaults | expected
