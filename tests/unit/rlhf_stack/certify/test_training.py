"""The layouts of certify's training rungs use the whole cluster, and their events are judged."""

import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from rlhf_stack.certify import training
from rlhf_stack.certify.ladder import NotClimbedError, Place
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


def test_events_of_nodes_without_gpus_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver, whose events name the engines, runs on the head, which may have no GPU."""
    head, worker = FreeNode("head", 0, 4, 0), FreeNode("worker", 8, 4, 8)

    def read(nodes: list[FreeNode], *_: object) -> list[list[dict[str, Any]]]:
        return [events()[:1] if node is head else events()[1:] for node in nodes]

    monkeypatch.setenv(env_vars.ACCELERATOR, "cpu")
    monkeypatch.setattr(training, "nodes_with_gpus", lambda _: nullcontext([worker]))
    monkeypatch.setattr(training, "free_nodes", lambda: [head, worker])
    monkeypatch.setattr(training, "make_files", lambda *_: Path("/nowhere"))
    monkeypatch.setattr(training, "on_every_node", read)
    monkeypatch.setattr(subprocess, "call", lambda _: 0)
    monkeypatch.setattr(tiny_run, "version", lambda _: "0.11.2")
    found = training.separate(Place("head:6379", "/nowhere", small=True))
    assert found.problem == ""
    assert {measured.name: measured.value for measured in found.measurements}["engines"] == 1


def test_events_that_two_nodes_report_count_once() -> None:
    assert distinct([events(), events()]) == sorted(events(), key=lambda event: float(event["time"]))
