"""rlhf_stack.recovery.nodes: which nodes answer after a fault, and which were lost."""

import subprocess
import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
from rlhf_stack.accelerator import nvidia
from rlhf_stack.compat import ray_private
from rlhf_stack.config import env_vars
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

        def get(self, task: str) -> str:
            return ""

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


def test_a_node_with_a_gpu_that_cannot_be_used_counts_as_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answered, so that Ray offered its GPU again until the restarts were used."""
    strategies = ModuleType("ray.util.scheduling_strategies")
    vars(strategies)["NodeAffinitySchedulingStrategy"] = lambda node, soft: node
    for name, module in (("ray", MagicMock()), ("ray.util", MagicMock()), (strategies.__name__, strategies)):
        monkeypatch.setitem(sys.modules, name, module)
    fake = MagicMock(
        nodes=lambda: [
            {"NodeID": node, "NodeManagerAddress": address, "Alive": True}
            for node, address in (("sound", "10.0.0.2"), ("broken", "10.0.0.3"))
        ],
        get={"sound": "", "broken": "GPU 3: GPU is lost"}.get,
    )
    fake.remote.return_value.return_value.options = lambda scheduling_strategy: MagicMock(
        remote=lambda: scheduling_strategy
    )
    fake.wait.side_effect = lambda tasks, **_: (tasks, [])
    monkeypatch.setattr(nodes, "ray", fake)
    found = clean_nodes()
    why = "GPU 3: GPU is lost"
    gone, faults = {"broken": ("10.0.0.3", why)}, {"10.0.0.3": why}
    assert found == Nodes({"10.0.0.2": "sound"}, ("10.0.0.3",), gone, (), faults)
    assert lost_nodes({"10.0.0.2": "sound", "10.0.0.3": "broken"}, [], found) == faults


@pytest.mark.parametrize(
    ("accelerator", "offered", "answer"),
    [
        ("cuda", None, "GPU 1: GPU is lost, GPU 3: the driver requires a reboot"),
        ("cuda", ["0", "3"], "GPU 3: the driver requires a reboot"),
        ("cuda", ["0", "2"], ""),
        ("cuda", ["GPU-1234"], ""),
        ("cpu", None, ""),
    ],
    ids=["all", "one is hidden", "both are hidden", "by UUID", "simulated GPUs"],
)
def test_a_node_reports_the_faults_of_the_gpus_that_it_offers(
    accelerator: str, offered: list[str] | None, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env_vars.ACCELERATOR, accelerator)
    monkeypatch.setattr(nvidia, "faults", lambda: {1: "GPU is lost", 3: "the driver requires a reboot"})
    monkeypatch.setattr(nodes, "node_gpu_entries", lambda: offered)
    monkeypatch.setattr(subprocess, "run", reap := MagicMock())
    assert nodes._reap() == answer
    reap.assert_called_once()


def test_a_node_without_nvidia_gpus_reports_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without asking Ray, whose private API this is."""
    monkeypatch.setenv(env_vars.ACCELERATOR, "rocm")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(subprocess, "run", MagicMock())
    monkeypatch.setattr(nodes, "node_gpu_entries", MagicMock(side_effect=AssertionError))
    assert nodes._reap() == ""
