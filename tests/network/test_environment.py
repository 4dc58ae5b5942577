"""The value of a variable that a Ray worker on the second machine really sees, however it was set."""

import json
from collections.abc import Callable, Sequence

import pytest

from scripts.matrix.load import Cell
from scripts.testing.cluster import Cluster
from scripts.testing.demo import SUBMIT
from tests.network.waiting import TEST_SECONDS

SCRIPT = "/tmp/look.py"
LOOK = """
import json, os, sys, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
ray.init(address="auto", log_to_driver=False)

@ray.remote(num_cpus=0)
def look(names):
    return {name: os.environ.get(name) for name in names}

answers = {}
for node in ray.nodes():
    there = look.options(scheduling_strategy=On(node["NodeID"], soft=False))
    answers[node["NodeManagerHostname"]] = there.remote(sys.argv[1:])
print("seen", json.dumps({host: ray.get(answer, timeout=60) for host, answer in answers.items()}))
"""
OWN, OF_JOB = "3", "5"


@pytest.fixture
def names(cell: Cell) -> list[str]:
    """The variables of the cell; none of Ray's own come first, which are given values of no sense to Ray."""
    return sorted((item.name for item in cell.env), key=lambda name: name.startswith("RAY_"))


@pytest.fixture
def defaults(cell: Cell) -> dict[str, str]:
    """The value of each in the matrix."""
    return {item.name: item.value for item in cell.env}


def on_second_node(cluster: Cluster, command: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """What a worker there sees of ``names`` when ``command`` runs `LOOK` on the head."""
    write = ["sh", "-c", f"cat >{SCRIPT} <<'END'\n{LOOK}\nEND"]
    cluster.output(cluster.head, write)
    output = cluster.output(cluster.head, [*command, "python", SCRIPT, *names])
    line = next(line for line in output.splitlines() if line.startswith("seen "))
    answers: dict[str, dict[str, str]] = json.loads(line.removeprefix("seen "))
    assert set(answers) == {"head", "worker"}
    return answers["worker"]


def submit(environment: dict[str, str] | None = None) -> list[str]:
    """`ray job submit`, with variables in its ``runtime_env``."""
    runtime_env = [f"--runtime-env-json={json.dumps({'env_vars': environment})}"] if environment else []
    return [*SUBMIT, *runtime_env, "--"]


@pytest.mark.timeout(TEST_SECONDS)
def test_defaults_reach_the_second_node(
    start: Callable[..., Cluster], names: list[str], defaults: dict[str, str]
) -> None:
    """Without a shell of ours; a job sees the same, and what its runtime_env sets in place of it."""
    cluster = start()
    changed = names[0]
    assert on_second_node(cluster, [], names) == defaults
    assert on_second_node(cluster, submit(), names) == defaults
    of_job = on_second_node(cluster, submit({changed: OF_JOB}), names)
    assert of_job == defaults | {changed: OF_JOB}


@pytest.mark.timeout(TEST_SECONDS)
def test_a_user_s_own_value_reaches_the_second_node(
    start: Callable[..., Cluster], cell: Cell, names: list[str], defaults: dict[str, str]
) -> None:
    """`docker run -e`, as anywhere: it wins over the default, and the node's log tells of it.

    A variable of the shell that submits a job does not reach the cluster; one of its runtime_env does.
    """
    own, other = names[:2]
    cluster = start(**{own: OWN})
    expected = defaults | {own: OWN}
    assert on_second_node(cluster, [], names) == expected
    assert on_second_node(cluster, submit(), names) == expected
    assert on_second_node(cluster, ["env", f"{other}={OF_JOB}", *submit()], names) == expected
    of_job = on_second_node(cluster, submit({own: OF_JOB}), names)
    assert of_job == expected | {own: OF_JOB}
    reason = next(" ".join(item.reason.split()) for item in cell.env if item.name == own)
    for log in cluster.logs().values():
        assert f"rlhf-stack: {own}={OWN} (default {defaults[own]}: {reason})" in log


@pytest.mark.timeout(TEST_SECONDS)
def test_a_profile_reaches_the_second_node(
    start: Callable[..., Cluster], cell: Cell, names: list[str], defaults: dict[str, str]
) -> None:
    """Asked for by one variable of the container."""
    if not cell.accelerator.profiles:
        pytest.skip("the matrix has no profile for this accelerator")
    profile = cell.accelerator.profiles[0]
    wanted = {item.name: item.value for item in profile.env}
    cluster = start(RLHF_STACK_PROFILE=profile.name)
    both = [*names, *wanted]
    assert on_second_node(cluster, [], both) == defaults | wanted
    assert on_second_node(cluster, submit(), both) == defaults | wanted
