"""rlhf_stack.recovery.ray_cluster: the nodes that a run must not use."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
from rlhf_stack.config import env_vars
from rlhf_stack.recovery import job, ray_cluster
from rlhf_stack.recovery.nodes import Nodes
from rlhf_stack.recovery.ray_cluster import RayCluster


@pytest.mark.parametrize("named", [{}, {env_vars.EXCLUDED_NODES: "10.0.0.9"}])
def test_a_node_that_is_no_longer_excluded_is_used_again(
    named: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's own exclusions stay: the variable of this shell, or that which --env gives the job."""
    monkeypatch.setenv(env_vars.EXCLUDED_NODES, "10.0.0.8" if named else "10.0.0.9")
    submitted: list[dict[str, Any]] = []
    monkeypatch.setattr(job, "submit", lambda *given: submitted.append(given[3]))

    def assess(_: Any, variables: Mapping[str, str], scales: bool) -> list[str]:
        return sorted(env_vars.excluded_nodes({env_vars.EXCLUDED_NODES: "10.0.0.9"} | dict(variables)))

    cluster = RayCluster("server", "auto", "run", assess, lambda: {"env_vars": named}, lambda _: [], 30.0)
    assert cluster.problems([], ["10.0.0.2"]) == ["10.0.0.2", "10.0.0.9"]
    cluster.submit("job", [], ["10.0.0.2"])
    assert submitted == [{"env_vars": {env_vars.EXCLUDED_NODES: "10.0.0.2,10.0.0.9"}}]
    assert cluster.problems([], []) == ["10.0.0.9"]


def test_a_node_that_the_user_excludes_need_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each restart waited for it, and was then given up."""
    monkeypatch.setenv(env_vars.EXCLUDED_NODES, "10.0.0.8")
    monkeypatch.setattr(ray_cluster, "connected", lambda _: nullcontext())
    found = Nodes({"10.0.0.1": "id"}, ("10.0.0.2", "10.0.0.8"), {"dead": ("10.0.0.8", "")})
    monkeypatch.setattr(ray_cluster, "clean_nodes", lambda: found)
    cluster = RayCluster("", "auto", "run", lambda *_: [], lambda: {"env_vars": {}}, lambda _: [], 30.0)
    assert cluster.clean() == Nodes(found.answering, ("10.0.0.2",), found.gone)
