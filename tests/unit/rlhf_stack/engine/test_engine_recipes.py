"""Records of how engines are created, and an engine that is created again elsewhere."""

import sys
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from rlhf_stack.cluster import gcs_kv
from rlhf_stack.cluster.actor_registry import PeerError
from rlhf_stack.config import env_vars
from rlhf_stack.engine import recipes
from rlhf_stack.placement import PlacementError

ARGUMENTS = {"model": "m", "bundle_indices": [2, 3], "mm_pad_token_ids": {5, 3}, "enable_sleep_mode": True}


def group(*addresses: str, number: str = "new") -> SimpleNamespace:
    bundles = [{"GPU": 1, "CPU": 1, f"node:{address}": 0.001} for address in addresses]
    return SimpleNamespace(bundle_specs=bundles, id=SimpleNamespace(hex=lambda: number))


def at(index: int, *addresses: str) -> SimpleNamespace:
    """The strategy of an actor on bundle ``index``."""
    return SimpleNamespace(
        placement_group=group(*addresses, number="first"), placement_group_bundle_index=index
    )


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    fake = MagicMock()
    fake.get_runtime_context.return_value.get_job_id.return_value = "job"
    stored: dict[str, dict[str, Any]] = {}
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(gcs_kv, "put_record", lambda key, record, *_: stored.update({key: record}))
    monkeypatch.setattr(
        gcs_kv, "list_records", lambda key, *_: [stored[one] for one in sorted(stored) if one.startswith(key)]
    )
    monkeypatch.setenv(env_vars.ENGINE_RESTARTS, "2")
    return fake


def test_without_restarts_nothing_is_recorded(ray: MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.ENGINE_RESTARTS, "0")
    assert recipes.record(0, at(0, "10.0.0.2"), False, 1, {}) == 0
    assert recipes.load(0) is None


def test_an_engine_is_lost_with_any_of_its_nodes(ray: MagicMock) -> None:
    ray.nodes.return_value = [
        {"NodeManagerAddress": "10.0.0.2", "Alive": True},
        {"NodeManagerAddress": "10.0.0.3", "Alive": False},
    ]
    nodes = "10.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.3"
    assert recipes.record(1, at(2, *nodes), True, 0, ARGUMENTS) == 2
    recipes.record(10, at(10, *["10.0.0.2"] * 11), True, 1, {"bundle_indices": None})
    assert recipes.lost_nodes(1) == ["10.0.0.3"]
    assert recipes.lost_nodes(10) == []
    assert recipes.sleeps(1)
    assert not recipes.sleeps(10)
    assert recipes.current(1, "handle") == "handle"


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    fake = MagicMock()
    monkeypatch.setitem(sys.modules, "openrlhf.trainer.ray.vllm_engine", fake)
    for package in ("openrlhf", "openrlhf.trainer", "openrlhf.trainer.ray"):
        monkeypatch.setitem(sys.modules, package, MagicMock())
    return fake


def test_a_replacement_is_created_with_the_same_arguments_on_its_own_bundles(
    ray: MagicMock, upstream: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [group("10.0.0.4", "10.0.0.4", number=number) for number in ("second", "third")]
    monkeypatch.setattr(recipes, "reserve_engines", lambda *_, **__: [places.pop(0)])
    release = MagicMock()
    monkeypatch.setattr(recipes, "release", release)
    recipes.record(1, at(2, *["10.0.0.3"] * 4), False, 0, ARGUMENTS)
    actor = upstream.RolloutRayActor.options.return_value
    actor.remote.side_effect = lambda **_: recipes.load(1)
    seen = recipes.replace(1, "former")
    assert seen is not None
    assert (seen["moved"], seen["name"]) == (True, None), "what the process of the replacement reads"
    created = actor.remote.call_args.kwargs
    assert created == ARGUMENTS | {"bundle_indices": [0, 1], "mm_pad_token_ids": [3, 5]}
    entry = recipes.load(1)
    assert entry is not None
    assert entry["addresses"] == ["10.0.0.4", "10.0.0.4"]
    assert recipes.current(1, "handle") is ray.get_actor.return_value
    ray.get_actor.assert_called_once_with(entry["name"])
    ray.get_actor.side_effect = ValueError("no actor has this name")
    assert recipes.current(1, "handle") == "handle", "the replacement is dead too"
    recipes.replace(1, "second actor")
    assert ray.kill.call_args_list == [call("former"), call("second actor")]
    assert release.call_args_list == [call("first"), call("second")], "no former place stays reserved"


def test_without_room_there_is_no_replacement(
    ray: MagicMock, upstream: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipes, "reserve_engines", MagicMock(side_effect=PlacementError("no GPU")))
    recipes.record(0, at(0, "10.0.0.3"), False, 1, {"bundle_indices": None})
    assert recipes.replace(0, "former") is None
    ray.kill.assert_not_called()


def test_new_nodes_are_awaited_once_for_each_loss(
    ray: MagicMock, upstream: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each further sync a run without the engine only looks for a place."""
    monkeypatch.setenv(env_vars.AUTOSCALE, "1")
    reserve = MagicMock(side_effect=PlacementError("no GPU"))
    monkeypatch.setattr(recipes, "reserve_engines", reserve)
    for index in range(2):
        recipes.record(index, at(0, "10.0.0.3"), False, 1, {"bundle_indices": None})
    for index in (0, 0, 0, 1, 1):
        assert recipes.replace(index, "former") is None
    gcs_kv.put_record("restarts/job/0", {"engine": 0, "restarts": 1})  # in its place, and it is lost again
    for _ in range(2):
        assert recipes.replace(0, "former") is None
    waits = [given.kwargs["wait"] for given in reserve.call_args_list]
    assert waits == [True, False, False, True, False, True, False]


def test_an_engine_on_the_gpus_of_the_trainer_does_not_move(
    ray: MagicMock, upstream: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = MagicMock()
    monkeypatch.setattr(recipes, "reserve_engines", reserve)
    recipes.record(0, at(0, "10.0.0.3"), True, 0.2, {"bundle_indices": None})
    assert recipes.replace(0, "former") is None
    reserve.assert_not_called()


@pytest.mark.parametrize(("used", "left"), [(0, 1), (1, 0), (2, None)])
def test_a_replacement_has_the_restarts_that_the_engine_has_left(
    ray: MagicMock, upstream: MagicMock, monkeypatch: pytest.MonkeyPatch, used: int, left: int | None
) -> None:
    monkeypatch.setattr(recipes, "reserve_engines", lambda *_, **__: [group("10.0.0.4")])
    monkeypatch.setattr(recipes, "release", MagicMock())
    recipes.record(0, at(0, "10.0.0.3"), False, 1, {"bundle_indices": None})
    if used:
        gcs_kv.put_record("restarts/job/0", {"engine": 0, "restarts": used})
    if left is None:
        with pytest.raises(PeerError, match=r"engine 0 was restarted 2 times, .*RLHF_STACK_ENGINE_RESTARTS"):
            recipes.replace(0, "former")
    else:
        recipes.replace(0, "former")
        given = upstream.RolloutRayActor.options.call_args.kwargs
        assert (given["max_restarts"], given["max_concurrency"]) == (left, recipes.MOST_CALLS)


def nodes(**alive: bool) -> list[dict[str, Any]]:
    """Ray's table, of nodes by the last part of their addresses."""
    return [
        {"NodeManagerAddress": f"10.0.0.{name[1]}", "Alive": is_alive} for name, is_alive in alive.items()
    ]


@pytest.mark.parametrize("room", [True, False], ids=["elsewhere", "nowhere else"])
def test_an_engine_moves_to_a_node_on_which_two_were_lost_only_without_another_place(
    ray: MagicMock,
    upstream: MagicMock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    room: bool,
) -> None:
    avoided: list[list[str]] = []

    def reserve(count: int, size: int, wait: bool, avoid: list[str] | None = None) -> list[Any]:
        avoided.append(list(avoid or []))
        if avoid and not room:
            raise PlacementError("no GPU")
        return [group("10.0.0.4")]

    monkeypatch.setattr(recipes, "reserve_engines", reserve)
    monkeypatch.setattr(recipes, "release", MagicMock())
    for index in range(3):
        recipes.record(index, at(0, "10.0.0.3"), False, 1, {"bundle_indices": None})
    ray.nodes.return_value = nodes(n3=False, n4=True)
    recipes.replace(0, "former")
    recipes.replace(1, "former")
    assert avoided == [[], []], "one death of a node with two engines is one loss"
    ray.nodes.return_value = [*nodes(n3=False), *nodes(n3=False, n4=True)]
    recipes.replace(2, "former")
    assert avoided[2:] == [["10.0.0.3"], *([] if room else [[]])]
    how = "avoids" if room else "has no place without"
    assert (
        f"engine 2 {how} nodes on which engines were lost 2 times: 10.0.0.3"
        in caplog.text + capsys.readouterr().out
    )


def test_a_node_on_which_processes_of_engines_were_lost_twice_is_unreliable_too(ray: MagicMock) -> None:
    recipes.record(0, at(0, "10.0.0.3"), False, 1, {"bundle_indices": None})
    recipes.note_lost_process(0)
    recipes.note_lost_process(0)
    assert recipes.unreliable_nodes() == [], "the same restart"
    gcs_kv.put_record("restarts/job/0", {"engine": 0, "restarts": 1})
    recipes.note_lost_process(0)
    assert recipes.unreliable_nodes() == ["10.0.0.3"]
    ray.get_runtime_context.return_value.get_job_id.return_value = "other"
    assert recipes.unreliable_nodes() == []


def test_the_losses_of_nodes_are_unknown_if_the_head_does_not_answer(
    ray: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes.record(0, at(0, "10.0.0.3"), False, 1, {"bundle_indices": None})
    slow = MagicMock(side_effect=TimeoutError("the head is busy"))
    monkeypatch.setattr(gcs_kv, "_warned", threading.Event())
    monkeypatch.setattr(gcs_kv, "put_record", slow)
    recipes.note_lost_process(0)
    monkeypatch.setattr(gcs_kv, "list_records", slow)
    recipes.note_lost_process(0)
    assert recipes.unreliable_nodes() == []
