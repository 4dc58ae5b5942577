"""The layouts of certify's training rungs use the whole cluster, and their events are judged."""

import json
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from rlhf_stack.certify import training
from rlhf_stack.certify.ladder import Found, NotClimbedError, Place
from rlhf_stack.certify.training import Layout, _changes, distinct, judged, layout
from rlhf_stack.config import env_vars
from rlhf_stack.demo import tiny_run
from rlhf_stack.placement import FreeNode


@pytest.mark.parametrize(
    ("gpus", "colocated", "expected"),
    [
        ([2, 2], False, Layout(1, 2, 1, 2)),
        ([2, 2], True, Layout(2, 2, 2, 2)),
        ([1], True, Layout(1, 1, 1, 1)),
        ([2], False, Layout(1, 1, 1, 1)),
        ([8], False, Layout(1, 4, 2, 2)),
        ([8, 8, 8, 8], True, Layout(4, 8, 16, 2)),
        ([8, 8, 8, 8], False, Layout(2, 8, 8, 2)),
        ([8] * 64, True, Layout(8, 8, 32, 2)),
        ([6, 8], True, Layout(2, 4, 4, 2)),
        ([3], False, Layout(1, 1, 1, 1)),
    ],
)
def test_layouts(gpus: list[int], colocated: bool, expected: Layout) -> None:
    found = layout(gpus, colocated)
    assert found == expected
    ranks = found.nodes * found.ranks
    assert tiny_run.BATCH % ranks == 0
    assert ranks + (0 if colocated else found.engines * found.size) <= sum(gpus)


@pytest.mark.parametrize(("name", "gpus", "flat"), [("separate", [1], False), ("separate", [2], True)])
def test_a_cluster_that_is_too_small_is_not_climbed(name: str, gpus: list[int], flat: bool) -> None:
    with pytest.raises(NotClimbedError, match="GPU"):
        _changes(name, gpus, flat)


@pytest.mark.parametrize(
    ("accelerator", "name", "flags"),
    [
        ("cpu", "separate", []),
        ("cuda", "separate", ["--vllm.sync_backend", "nccl", "--vllm.gpu_memory_utilization", "0.3"]),
        ("cuda", "hybrid", ["--vllm.gpu_memory_utilization", "0.3"]),
    ],
)
def test_on_gpus_weights_are_sent_over_nccl_and_engines_take_a_part_of_the_memory(
    monkeypatch: pytest.MonkeyPatch, accelerator: str, name: str, flags: list[str]
) -> None:
    monkeypatch.setenv(env_vars.ACCELERATOR, accelerator)
    assert _changes(name, [4, 4], False) == [*layout([4, 4], name == "hybrid").arguments, *flags]


def events(**changes: Any) -> list[dict[str, Any]]:
    """The events of a run of two steps, of which those of ``verify`` have ``changes``."""
    found: list[dict[str, Any]] = [{"event": "engine", "engine": 0, "straddles": False, "time": 0.0}]
    for step in (1, 2):
        found += [
            {"event": "step", "step": step, "time": step},
            {"event": "sync", "seconds": 0.5, "backend": "gloo", "time": step},
            {"event": "verify", "equal": True, "mismatched": [], "parameters": 27, "time": step} | changes,
        ]
    return found


def test_events_of_a_good_run_and_of_bad_ones() -> None:
    assert judged(events(), 9.0, []).problem == ""
    assert "a, b" in judged(events(equal=False, mismatched=["b", "a"]), 9.0, []).problem
    assert "1 of 2 steps" in judged(events()[:4], 9.0, []).problem
    without = [event for event in events() if event["event"] != "verify"]
    assert "0 of 2 syncs" in judged(without, 9.0, []).problem
    straddling = [event | {"straddles": True} for event in events()]
    assert "straddle" in judged(straddling, 9.0, []).problem
    assert "no engine" in judged(events()[1:], 9.0, []).problem


FITS: dict[str, Any] = {"settings": {"--ds.zero_stage 2": "weights fit"}, "problems": []}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> tuple[FreeNode, FreeNode]:
    """A head without GPUs and a worker, on which the trainer does nothing and `tune` finds that it fits."""
    head, worker = FreeNode("head", 0, 4, 0), FreeNode("worker", 8, 4, 8)
    monkeypatch.setenv(env_vars.ACCELERATOR, "cpu")
    monkeypatch.setattr(training, "nodes_with_gpus", lambda _: nullcontext([worker]))
    monkeypatch.setattr(training, "free_nodes", lambda: [head, worker])
    monkeypatch.setattr(training, "make_files", lambda *_: Path("/nowhere"))
    monkeypatch.setattr(training, "choose", lambda *_: FITS)
    monkeypatch.setattr(subprocess, "call", lambda _: 0)
    monkeypatch.setattr(tiny_run, "version", lambda _: "0.11.2")
    return head, worker


def test_events_of_nodes_without_gpus_count(
    monkeypatch: pytest.MonkeyPatch, cluster: tuple[FreeNode, FreeNode]
) -> None:
    """The driver, whose events name the engines, runs on the head, which may have no GPU."""

    def read(nodes: list[FreeNode], *_: object) -> list[list[dict[str, Any]]]:
        return [events()[:1] if node is cluster[0] else events()[1:] for node in nodes]

    monkeypatch.setattr(training, "on_every_node", read)
    found = training.separate(Place("head:6379", "/nowhere", small=True))
    assert found.problem == ""
    assert {measured.name: measured.value for measured in found.measurements}["engines"] == 1


def test_events_that_two_nodes_report_count_once() -> None:
    assert distinct([events(), events()]) == sorted(events(), key=lambda event: float(event["time"]))


PLACE = Place("head:6379", "/nowhere", small=True)


def checks(*sides: str, violated: bool = False) -> list[dict[str, Any]]:
    """The events of the check for GPU contention, on GPU 0 of each side."""
    found: list[dict[str, Any]] = [
        {"event": "cotenancy", "side": side, "gpu": "0", "time": 0.0} for side in sides
    ]
    blocked = {"event": "cotenancy violated", "gpu": "0", "collectives": ["barrier of rank 1"], "time": 1.0}
    return [*found, *([blocked] if violated else [])]


@pytest.mark.parametrize(
    ("recorded", "problem"),
    [
        (checks("trainer", "engine"), ""),
        (checks("trainer"), "no engine checked its GPU"),
        ([], "no trainer checked its GPU for contention; no engine checked its GPU"),
        ([*checks("trainer"), checks("engine")[0] | {"gpu": "1"}], "no GPU was checked"),
        (
            checks("trainer", "engine", violated=True),
            "an engine generated on GPU 0 while the trainer waited there: barrier of rank 1",
        ),
    ],
)
def test_contention_must_be_checked_on_both_sides_and_not_found(
    recorded: list[dict[str, Any]], problem: str
) -> None:
    found = training.contention(recorded).problem
    assert found == problem or (problem and found.startswith(problem))


@pytest.mark.parametrize(
    ("climb", "is_checked"), [(training.separate, False), (training.colocated, True)], ids=["alone", "shared"]
)
@pytest.mark.usefixtures("cluster")
def test_contention_is_checked_where_trainer_and_engines_share_gpus(
    monkeypatch: pytest.MonkeyPatch, climb: Callable[[Place], Found], is_checked: bool
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str]) -> int:
        commands.append(command)
        return 0

    recorded = [[*events(), *checks("trainer", "engine")]]
    monkeypatch.setattr(training, "on_every_node", lambda *_: recorded)
    monkeypatch.setattr(subprocess, "call", run)
    found = climb(PLACE)
    assert found.problem == ""
    assert found.details["tune"] == FITS
    assert (json.loads(commands[0][4]).get(env_vars.CHECK_COTENANCY) == "1") == is_checked
    assert ("contention" in found.details) == is_checked


@pytest.mark.usefixtures("cluster")
def test_a_trainer_that_contention_ended_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = [checks("trainer", "engine", violated=True)]
    monkeypatch.setattr(training, "on_every_node", lambda *_: recorded)
    monkeypatch.setattr(subprocess, "call", lambda _: 1)
    with pytest.raises(RuntimeError, match=r"exit code 1.*while the trainer waited there: barrier of rank 1"):
        training.colocated(PLACE)


@pytest.mark.usefixtures("cluster")
def test_the_trainers_exit_code_is_named_also_if_a_node_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent = MagicMock(side_effect=RuntimeError("worker: no answer within 120 s"))
    monkeypatch.setattr(training, "on_every_node", silent)
    monkeypatch.setattr(subprocess, "call", lambda _: 9)
    with pytest.raises(RuntimeError, match="exit code 9: see the log; worker: no answer within 120 s"):
        training.separate(PLACE)


@pytest.mark.usefixtures("cluster")
def test_a_run_that_tune_refuses_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "on_every_node", lambda *_: [events()])
    monkeypatch.setattr(training, "choose", lambda *_: FITS | {"problems": ["it does not fit"]})
    assert training.separate(PLACE).problem == "tune: it does not fit"
