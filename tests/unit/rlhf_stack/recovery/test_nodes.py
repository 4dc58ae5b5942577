"""rlhf_stack.recovery.nodes: which nodes answer after a fault, and which of them were restarted."""

import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
from rlhf_stack.recovery import nodes
from rlhf_stack.recovery.nodes import Nodes, clean_nodes, lost_nodes


def test_a_restarted_node_answers_by_its_new_id_while_ray_still_lists_the_old_one(
    monkeypatch: pytest.MonkeyPatch,
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
    assert found == Nodes({"10.0.0.2": "new", "10.0.0.4": "same"}, ("10.0.0.3",))
    before = {"10.0.0.2": "old", "10.0.0.3": "gone", "10.0.0.4": "same", "10.0.0.5": "dead"}
    assert lost_nodes(before, found) == ("10.0.0.2", "10.0.0.3", "10.0.0.5")
