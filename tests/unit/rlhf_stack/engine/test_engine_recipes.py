"""Records of how engines are created, and an engine that is created again elsewhere."""

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from rlhf_stack.cluster import gcs_kv
from rlhf_stack.config import env_vars
from rlhf_stack.engine import recipes
from rlhf_stack.placement import PlacementError

ARGUMENTS = {"model": "m", "bundle_indices": [2, 3], "mm_pad_token_ids": {5, 3}, "enable_sleep_mode": True}


def group(*addresses: str) -> SimpleNamespace:
    bundles = [{"GPU": 1, "CPU": 1, f"node:{address}": 0.001} for address in addresses]
    return SimpleNamespace(bundle_specs=bundles, id=SimpleNamespace(hex=lambda: "new"))


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    fake = MagicMock()
    fake.get_runtime_context.return_value.get_job_id.return_value = "job"
    stored: dict[str, dict[str, Any]] = {}
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(gcs_kv, "put_record", stored.__setitem__)
    monkeypatch.setattr(
        gcs_kv, "list_records", lambda key: [stored[one] for one in sorted(stored) if one.startswith(key)]
    )
    monkeypatch.setenv(env_vars.ENGINE_RESTARTS, "2")
    return fake


def test_without_restarts_nothing_is_recorded(ray: MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.ENGINE_RESTARTS, "0")
    assert recipes.record(0, group("10.0.0.2"), None, 1, {}) == 0
    assert recipes.load(0) is None


def test_an_engine_is_lost_with_any_of_its_nodes(ray: MagicMock) -> None:
    ray.nodes.return_value = [
        {"NodeManagerAddress": "10.0.0.2", "Alive": True},
        {"NodeManagerAddress": "10.0.0.3", "Alive": False},
    ]
    assert recipes.record(1, group("10.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.3"), [2, 3], 0, ARGUMENTS) == 2
    recipes.record(10, group(*["10.0.0.2"] * 11), None, 1, {})
    assert recipes.lost_nodes(1) == ["10.0.0.3"]
    assert recipes.lost_nodes(10) == []
    assert recipes.sleeps(1)
    assert not recipes.sleeps(10)
    assert recipes.current(1, "handle") == "handle"


def test_a_replacement_is_created_with_the_same_arguments_on_its_own_bundles(
    ray: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream = MagicMock()
    monkeypatch.setitem(sys.modules, "openrlhf.trainer.ray.vllm_engine", upstream)
    for package in ("openrlhf", "openrlhf.trainer", "openrlhf.trainer.ray"):
        monkeypatch.setitem(sys.modules, package, MagicMock())
    monkeypatch.setattr(recipes, "reserve_engines", lambda *_, **__: group("10.0.0.4", "10.0.0.4"))
    recipes.record(1, group(*["10.0.0.3"] * 4), [2, 3], 0, ARGUMENTS)
    assert recipes.replace(1) is upstream.RolloutRayActor.options.return_value.remote.return_value
    created = upstream.RolloutRayActor.options.return_value.remote.call_args.kwargs
    assert created == ARGUMENTS | {"bundle_indices": [0, 1], "mm_pad_token_ids": [3, 5]}
    entry = recipes.load(1)
    assert entry is not None
    assert entry["addresses"] == ["10.0.0.4", "10.0.0.4"]
    assert recipes.current(1, "handle") is ray.get_actor.return_value
    ray.get_actor.assert_called_once_with(entry["name"])


def test_without_room_there_is_no_replacement(ray: MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openrlhf.trainer.ray.vllm_engine", MagicMock())
    for package in ("openrlhf", "openrlhf.trainer", "openrlhf.trainer.ray"):
        monkeypatch.setitem(sys.modules, package, MagicMock())
    monkeypatch.setattr(recipes, "reserve_engines", MagicMock(side_effect=PlacementError("no GPU")))
    recipes.record(0, group("10.0.0.3"), None, 1, ARGUMENTS)
    assert recipes.replace(0) is None
