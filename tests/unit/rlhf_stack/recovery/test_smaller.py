"""rlhf_stack.recovery.smaller: command lines with fewer engines or ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
from rlhf_stack.memory import Zero
from rlhf_stack.openrlhf.run_spec import Role, run_of
from rlhf_stack.placement.model import Engines, Group, Request
from rlhf_stack.recovery.smaller import (
    changed_layout,
    why_no_fewer_engines,
    why_no_fewer_ranks,
    with_fewer_engines,
    with_fewer_ranks,
)

from tests.unit.openrlhf_arguments import sections


def run(count: int, shares: str | None = None) -> Any:
    return SimpleNamespace(request=SimpleNamespace(engines=Engines(count, 2, shares)))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["x", "--vllm.num_engines", "3", "y"], ["x", "--vllm.num_engines", "2", "y"]),
        (["--vllm_num_engines=3"], ["--vllm_num_engines=2"]),
    ],
)
def test_engines_are_left_out_one_after_the_other(words: list[str], expected: list[str]) -> None:
    first, second = with_fewer_engines(words, run(3))
    assert first == expected
    assert second == [word.replace("2", "1") for word in expected]


def test_the_last_engine_and_engines_on_the_gpus_of_the_trainer_stay() -> None:
    words = ["--vllm.num_engines", "1"]
    assert list(with_fewer_engines(words, run(1))) == []
    assert list(with_fewer_engines(words, run(4, shares="actor"))) == []


def trained(nodes: dict[str, int], engines: Engines | None, **changed: Any) -> Any:
    """A run whose roles each have a group of their own, with two GPUs on each node."""
    roles = tuple(Role(name, name, 2 * count, "", True, False) for name, count in nodes.items())
    request = Request(tuple(Group(name, count, 2) for name, count in nodes.items()), engines)
    values = {"flat": False, "tensor_parallel": 1, "zero": Zero(2, 1), "weight_decay": 0.0} | changed
    return SimpleNamespace(roles=roles, request=request, **values)


def test_roles_lose_nodes_and_then_engines_those_of_their_own() -> None:
    words = ["x", "--actor.num_nodes=3", "--ref.num_nodes", "2", "--vllm.num_engines", "2"]
    found = [" ".join(one) for one in with_fewer_ranks(words, trained({"actor": 3, "ref": 2}, Engines(2, 1)))]
    assert found == [
        f"x --actor.num_nodes={nodes} --ref.num_nodes {nodes} --vllm.num_engines {engines}"
        for nodes in (2, 1)
        for engines in (2, 1)
    ]


def test_engines_on_the_gpus_of_the_trainer_fill_those_that_are_left() -> None:
    words = ["x", "--actor.num_nodes", "4", "--vllm.num_engines", "2"]
    found = with_fewer_ranks(words, trained({"actor": 4}, Engines(2, 4, "actor")))
    assert [" ".join(one) for one in found] == ["x --actor.num_nodes 2 --vllm.num_engines 1"]


@pytest.mark.parametrize(
    "changed",
    [
        {"flat": True, "release": "0.5.1"},
        {"tensor_parallel": 2},
        {"zero": Zero(0, 1)},
        {"zero": Zero(3, 1), "weight_decay": 0.1},
    ],
)
def test_a_trainer_whose_checkpoint_fits_no_other_number_of_ranks_keeps_them(changed: dict[str, Any]) -> None:
    words = ["x", "--actor.num_nodes", "2", "--vllm.num_engines", "1"]
    assert list(with_fewer_ranks(words, trained({"actor": 2}, Engines(1, 1), **changed))) == []


def test_a_trainer_on_one_node_and_without_engines() -> None:
    assert list(with_fewer_ranks(["x"], trained({"actor": 1}, None))) == []
    words = ["x", "--actor.num_nodes", "2"]
    assert list(with_fewer_ranks(words, trained({"actor": 2}, None))) == [["x", "--actor.num_nodes", "1"]]


@pytest.mark.parametrize(
    ("engines", "reason"),
    [
        (Engines(2, 1), ""),
        (Engines(1, 1), "the run has only one engine"),
        (Engines(2, 1, "actor"), "engines share the trainer's GPUs"),
        (None, "the run has no engines"),
    ],
)
def test_why_there_are_no_fewer_engines(engines: Engines | None, reason: str) -> None:
    run = trained({"actor": 1}, engines)
    assert why_no_fewer_engines(run) == reason
    assert bool(list(with_fewer_engines(["--vllm.num_engines", "2"], run))) == (not reason)


def test_a_trainer_on_one_node_is_a_reason_for_no_fewer_ranks() -> None:
    assert why_no_fewer_ranks(trained({"actor": 1, "ref": 1}, None)) == "the trainer has only one node"
    assert not why_no_fewer_ranks(trained({"actor": 2, "ref": 1}, None))


@pytest.mark.parametrize(("stage", "decay", "allowed"), [(3, 0.1, False), (3, 0.0, True), (2, 0.1, True)])
def test_a_weight_decay_at_stage_3_is_a_reason_for_no_fewer_ranks(
    stage: int, decay: float, allowed: bool
) -> None:
    """DeepSpeed would give norms and biases the decay of the other weights."""
    reason = why_no_fewer_ranks(trained({"actor": 2}, None, zero=Zero(stage, 1), weight_decay=decay))
    assert ("weight decay" in reason) == (not allowed)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_run_has_the_weight_decay_of_a_trained_role(role: str) -> None:
    assert run_of("0.11.2", sections()).weight_decay == 0
    adam = {f"{role}__adam": SimpleNamespace(weight_decay=0.1)}
    assert run_of("0.11.2", sections(**adam)).weight_decay == 0.1


def test_the_layout_of_a_command_line_is_compared_in_both_forms_of_a_flag() -> None:
    before = ["x", "--actor.num_nodes=3", "--ref.num_nodes", "2", "--vllm_num_engines", "2"]
    after = ["x", "--actor.num_nodes=2", "--ref.num_nodes", "2", "--vllm_num_engines", "1", "--load"]
    assert changed_layout(before, after) == ["actor.num_nodes 3 to 2", "vllm_num_engines 2 to 1"]
