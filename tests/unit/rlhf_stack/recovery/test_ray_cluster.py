"""rlhf_stack.recovery.ray_cluster: the nodes that a run must not use."""

import os
from typing import Any

import pytest
from rlhf_stack.config import env_vars
from rlhf_stack.recovery.ray_cluster import RayCluster


def test_a_node_that_is_no_longer_excluded_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own exclusions stay."""
    monkeypatch.setenv(env_vars.EXCLUDED_NODES, "10.0.0.9")

    def assess(*_: Any) -> list[str]:
        return os.environ[env_vars.EXCLUDED_NODES].split(",")

    cluster = RayCluster("server", "auto", "run", assess, dict, lambda _: [], 30.0)
    assert cluster.problems([], ["10.0.0.2"]) == ["10.0.0.2", "10.0.0.9"]
    assert cluster.problems([], []) == ["10.0.0.9"]
