import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from rlhf_stack.openrlhf import run_groups
from rlhf_stack.placement import reservation


def actor_class(name: str) -> Any:
    """As Ray's, which has no ``__name__``."""
    return SimpleNamespace(__ray_metadata__=SimpleNamespace(class_name=name))


@pytest.fixture(autouse=True)
def reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    roles = {"actor": "actor", "ref": "actor", "reward": "reward", "reward1": "reward1"}
    groups = {name: f"group of {name}" for name in ("actor", "reward", "reward1", "engines")}
    monkeypatch.setattr(run_groups, "request_of", lambda _: (None, roles))
    monkeypatch.setattr(reservation, "reserve", lambda _: groups)
    monkeypatch.setattr(reservation, "reserve_engines", lambda *given: given)
    monkeypatch.setattr(run_groups, "_unclaimed", {})


def test_roles_that_share_gpus_share_a_group() -> None:
    groups = run_groups.reserve_run(None)
    assert groups["ref"] == groups["actor"] == "group of actor"


def test_each_role_claims_its_group_once() -> None:
    run_groups.reserve_run(None)
    policy = actor_class("PolicyModelActor")
    assert run_groups.claim_role_group(policy) == "group of actor"
    assert run_groups.claim_role_group(policy) is None


def test_each_reward_model_claims_its_own_group() -> None:
    run_groups.reserve_run(None)
    claims = [run_groups.claim_role_group(actor_class("RewardModelRayActor")) for _ in range(3)]
    assert claims == ["group of reward", "group of reward1", None]


def test_an_unknown_class_and_a_process_without_a_run_have_no_group() -> None:
    assert run_groups.claim_role_group(actor_class("PolicyModelActor")) is None
    run_groups.reserve_run(None)
    assert run_groups.claim_role_group(actor_class("Own")) is None


def test_engines_claim_their_groups_or_reserve_others() -> None:
    run_groups.reserve_run(None)
    assert run_groups.claim_engine_groups(3, 4) == "group of engines"
    assert run_groups.claim_engine_groups(3, 4) == (3, 4)


def test_the_controller_runs_on_the_node_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, trainer = MagicMock(), MagicMock()
    ray.util.placement_group_table.return_value = {"bundles_to_node_id": {0: "node 3", 1: "node 1"}}
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(run_groups, "_reserved", {})
    assert run_groups.controller(trainer) is trainer, "nothing is reserved"
    run_groups.reserve_run(None)
    plain = SimpleNamespace()
    assert run_groups.controller(plain) is plain
    assert run_groups.controller(trainer) is trainer.options.return_value
    ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy.assert_called_once_with("node 3", soft=True)
