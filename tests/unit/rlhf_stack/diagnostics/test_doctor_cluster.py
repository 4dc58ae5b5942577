"""rlhf_stack.diagnostics.doctor.cluster on simulated nodes: all are queried at once, within the deadline."""

import contextlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from rlhf_stack.diagnostics.doctor import cluster

NEVER = float("inf")


class FakeRay:
    """Ray on a simulated clock: a task of a node ends after the node's latency."""

    def __init__(self, latencies: dict[str, float], skews: dict[str, float]) -> None:
        self.now = 1000.0
        self.latencies, self.skews = latencies, skews
        self.ends: dict[int, float] = {}
        self.results: dict[int, Any] = {}
        self.clocks: list[float] = []
        self.most_clocks = 0
        self.exceptions = SimpleNamespace(RayError=RuntimeError)

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": n, "NodeManagerAddress": f"ip-{n}", "Alive": True} for n in self.latencies]

    def start(self, node: str, function: Any) -> int:
        task = len(self.ends)
        self.ends[task] = self.now + self.latencies[node]
        clock = self.now + self.latencies[node] / 2 + self.skews.get(node, 0.0)
        self.results[task] = clock if function is cluster._now else f"facts of {node}"
        if function is cluster._now:
            self.clocks.append(self.ends[task])
            self.most_clocks = max(self.most_clocks, sum(end > self.now for end in self.clocks))
        return task

    def wait(self, tasks: list[int], num_returns: int = 1, timeout: float = 0.0) -> Any:
        enough = sorted(self.ends[task] for task in tasks)[num_returns - 1]
        self.now = max(self.now, min(enough, self.now + timeout))
        done = [task for task in tasks if self.ends[task] <= self.now][:num_returns]
        return done, sorted(set(tasks) - set(done))

    def get(self, task: int) -> Any:
        return self.results[task]


def collect(monkeypatch: pytest.MonkeyPatch, ray: FakeRay, timeout: float) -> dict[str, Any]:
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(cluster, "connected", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(cluster, "_start_task", ray.start)
    monkeypatch.setattr(cluster, "time", SimpleNamespace(time=lambda: ray.now, monotonic=lambda: ray.now))
    return {answer.address: answer for answer in cluster.collect_from_nodes("head:6379", timeout)}


def test_a_thousand_nodes_take_no_longer_than_some(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay({f"{number}": 0.05 for number in range(1000)}, {"7": 3.0})
    found = collect(monkeypatch, ray, 30.0)
    assert all(answer.node is not None for answer in found.values())
    assert found["ip-7"].clock_offset == pytest.approx(3.0)
    assert found["ip-8"].clock_offset == pytest.approx(0.0)
    assert ray.now - 1000.0 < 5.0
    assert 1 < ray.most_clocks <= cluster.AT_ONCE


def test_a_node_that_never_responds_does_not_take_the_time_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = FakeRay({"a": 0.05, "b": NEVER, "c": 2.0}, {"c": -2.0})
    found = collect(monkeypatch, ray, 10.0)
    assert (found["ip-a"].node, found["ip-b"].node, found["ip-c"].node) == ("facts of a", None, "facts of c")
    assert (found["ip-c"].clock_offset, found["ip-c"].clock_error) == (
        pytest.approx(-2.0),
        pytest.approx(1.0),
    )
    assert ray.now - 1000.0 <= 10.0
