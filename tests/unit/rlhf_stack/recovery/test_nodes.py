"""rlhf_stack.recovery.nodes: which nodes answer after a fault, and which were lost."""

import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
from rlhf_stack.compat import ray_private
from rlhf_stack.recovery import nodes
from rlhf_stack.recovery.nodes import Nodes, clean_nodes, lost_nodes


@pytest.mark.parametrize("has_reasons", [True, False])
def test_a_restarted_node_answers_by_its_new_id_while_ray_still_lists_the_old_one(
    has_reasons: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = {"new": "10.0.0.2", "old": "10.0.0.2", "gone": "10.0.0.3", "same": "10.0.0.4", "dead": "10.0.0.5"}
    strategies = ModuleType("ray.util.scheduling_strategies")
    vars(strategies)["NodeAffinitySchedulingStrategy"] = lambda node, soft: node
    for name, module in (("ray", MagicMock()), ("ray.util", MagicMock()), (strategies.__name__, strategies)):
        monkeypatch.setitem(sys.modules, name, module)

    class Ray(MagicMock):
        def nodes(self) -> list[dict[str, Any]]:
            return [
                {"NodeID": node, "NodeManagerAddress": address, "Alive": node != "dead"}
                | ({"DeathReason": 2, "DeathReasonMessage": "cut off"} if has_reasons else {})
                for node, address in ids.items()
            ]

        def remote(self, **_: Any) -> Any:
            task = MagicMock()
            task.options = lambda scheduling_strategy: MagicMock(remote=lambda: scheduling_strategy)
            return lambda _: task

        def wait(self, tasks: list[str], **_: Any) -> tuple[list[str], list[str]]:
            return [one for one in tasks if one not in ("old", "gone")], ["old", "gone"]

    monkeypatch.setattr(nodes, "ray", Ray())
    found = clean_nodes()
    why = "cut off" if has_reasons else ""
    gone = {"old": ("10.0.0.2", why), "gone": ("10.0.0.3", why), "dead": ("10.0.0.5", why)}
    assert found == Nodes({"10.0.0.2": "new", "10.0.0.4": "same"}, ("10.0.0.3",), gone)
    before = {"10.0.0.2": "old", "10.0.0.3": "gone", "10.0.0.4": "same", "10.0.0.5": "dead"}
    assert lost_nodes(before, [], found) == dict.fromkeys(("10.0.0.2", "10.0.0.3", "10.0.0.5"), why)


def test_nodes_that_joined_can_be_lost_and_nodes_that_were_removed_when_idle_are_not() -> None:
    gone = {"joined": ("10.0.0.2", "cut off"), "dead before": ("10.0.0.3", ""), "first": ("10.0.0.6", "")}
    now = Nodes({"10.0.0.1": "same", "10.0.0.6": "again"}, (), gone, ("idle",))
    before = {"10.0.0.1": "same", "10.0.0.4": "idle", "10.0.0.5": "forgotten by Ray"}
    assert lost_nodes(before, ["dead before"], now) == {
        "10.0.0.2": "cut off",
        "10.0.0.5": "",
        "10.0.0.6": "",
    }


def test_a_node_that_the_autoscaler_removed_while_it_was_asked_is_not_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its task fails, and Ray's table says why only afterwards."""
    strategies = ModuleType("ray.util.scheduling_strategies")
    vars(strategies)["NodeAffinitySchedulingStrategy"] = lambda node, soft: node
    for name, module in (("ray", MagicMock()), ("ray.util", MagicMock()), (strategies.__name__, strategies)):
        monkeypatch.setitem(sys.modules, name, module)
    entry = {"NodeID": "idle", "NodeManagerAddress": "10.0.0.2"}
    removed = entry | {"Alive": False, "DeathReason": ray_private.REMOVED_WHEN_IDLE}
    tables = iter([[entry | {"Alive": True}], [removed]])
    fake = MagicMock(nodes=lambda: next(tables))
    fake.wait.side_effect = lambda tasks, **_: ([], tasks)
    monkeypatch.setattr(nodes, "ray", fake)
    assert clean_nodes() == Nodes({}, ("10.0.0.2",), {}, ("idle",))
