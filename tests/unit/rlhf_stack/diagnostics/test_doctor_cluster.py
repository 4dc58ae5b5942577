"""rlhf_stack.diagnostics.doctor.cluster on simulated nodes: all are queried at once, within the deadline."""

import contextlib
import json
import sys
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from rlhf_stack.cleanup import process_table
from rlhf_stack.cli.main import main
from rlhf_stack.compat import ray_private
from rlhf_stack.diagnostics.doctor import cluster, comparison
from rlhf_stack.diagnostics.doctor.facts import LostNode

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
        self.dead: list[dict[str, Any]] = []
        self.exceptions = SimpleNamespace(RayError=RuntimeError)

    def nodes(self) -> list[dict[str, Any]]:
        live = [{"NodeID": n, "NodeManagerAddress": f"ip-{n}", "Alive": True} for n in self.latencies]
        return [*self.dead, *live]

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


def collect(
    monkeypatch: pytest.MonkeyPatch, ray: FakeRay, timeout: float
) -> tuple[dict[str, Any], list[LostNode]]:
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(cluster, "connected", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(cluster, "_start_task", ray.start)
    monkeypatch.setattr(cluster, "time", SimpleNamespace(time=lambda: ray.now, monotonic=lambda: ray.now))
    answers, lost = cluster.collect_from_nodes("head:6379", timeout)
    return {answer.address: answer for answer in answers}, lost


def test_a_thousand_nodes_take_no_longer_than_some(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay({f"{number}": 0.05 for number in range(1000)}, {"7": 3.0})
    found, _ = collect(monkeypatch, ray, 30.0)
    assert all(answer.node is not None for answer in found.values())
    assert found["ip-7"].clock_offset == pytest.approx(3.0)
    assert found["ip-8"].clock_offset == pytest.approx(0.0)
    assert ray.now - 1000.0 < 5.0
    assert 1 < ray.most_clocks <= cluster.AT_ONCE


def test_a_node_that_never_responds_does_not_take_the_time_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = FakeRay({"a": 0.05, "b": NEVER, "c": 2.0}, {"c": -2.0})
    found, _ = collect(monkeypatch, ray, 10.0)
    assert (found["ip-a"].node, found["ip-b"].node, found["ip-c"].node) == ("facts of a", None, "facts of c")
    assert (found["ip-c"].clock_offset, found["ip-c"].clock_error) == (
        pytest.approx(-2.0),
        pytest.approx(1.0),
    )
    assert ray.now - 1000.0 <= 10.0


def dead(node: str, address: str, **fields: Any) -> dict[str, Any]:
    """An entry of ``ray.nodes()``, in Ray 2.9.3 and 2.12.0 without ``fields``."""
    return {"NodeID": node, "NodeManagerAddress": address, "Alive": False} | fields


def test_a_dead_node_is_lost_until_its_address_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay({"a": 0.05, "b": 0.05}, {})
    ray.dead = [
        dead("1", "ip-b"),
        dead("2", "ip-c", DeathReason=2, DeathReasonMessage="health check failed"),
        dead("3", "ip-c", DeathReason=1, DeathReasonMessage="received SIGTERM"),
        dead("4", "ip-d", DeathReason=2, DeathReasonMessage="health check failed"),
        dead("5", "ip-e", DeathReason=ray_private.REMOVED_WHEN_IDLE, DeathReasonMessage="idle"),
    ]
    ends = {"1": 100.0, "2": 500.0, "3": 300.0, "4": 400.0, "5": 600.0}
    monkeypatch.setattr(ray_private, "node_end_times", lambda *_: ends)
    found, lost = collect(monkeypatch, ray, 30.0)
    assert set(found) == {"ip-a", "ip-b"}
    assert lost == [
        LostNode("ip-c", "health check failed", 500.0),
        LostNode("ip-d", "health check failed", 400.0),
    ]


def test_lost_nodes_are_found_without_a_time_or_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay({"a": 0.05}, {})
    ray.dead = [dead("2", "ip-c"), dead("1", "ip-b")]
    monkeypatch.setattr(ray_private, "node_end_times", MagicMock(side_effect=RuntimeError("of the GCS")))
    assert collect(monkeypatch, ray, 30.0)[1] == [LostNode("ip-b"), LostNode("ip-c")]


@pytest.mark.parametrize(
    ("lost", "what", "evidence"),
    [
        ([LostNode("b", "", 1764320400.5)], "1 node is lost", "b at 2025-11-28 09:00:00 UTC"),
        (
            [LostNode("b", "no\nheartbeat", 1764320400.5), LostNode("c", "", 1764320400.5)],
            "2 nodes are lost",
            "b at 2025-11-28 09:00:00 UTC: no heartbeat; c at 2025-11-28 09:00:00 UTC",
        ),
        (
            [LostNode(f"ip-{n}", "", 1.0) for n in range(500)],
            "500 nodes are lost",
            "; ".join(f"ip-{n} at 1970-01-01 00:00:01 UTC" for n in range(3)) + "; 497 more",
        ),
    ],
)
def test_nodes_that_were_lost_long_ago_are_one_note_of_bounded_length(
    lost: list[LostNode], what: str, evidence: str
) -> None:
    [finding] = comparison.lost_nodes(lost)
    assert (finding.id, finding.severity, finding.evidence) == ("lost-nodes", "note", evidence)
    assert finding.what.startswith(what)


def test_nodes_that_were_lost_in_the_last_hour_or_at_an_unknown_time_are_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1764320400.0  # 2025-11-28 09:00:00 UTC
    monkeypatch.setattr(comparison, "time", SimpleNamespace(**vars(time) | {"time": lambda: now}))
    ends = {"b": now - 3599, "c": now - 3601, "d": None, "e": now + 5}
    recent, earlier = comparison.lost_nodes([LostNode(name, "", end) for name, end in ends.items()])
    assert (recent.severity, earlier.severity) == ("warning", "note")
    assert recent.what == "3 nodes are lost: Ray found them dead, and no live node has the address"
    assert recent.evidence == "b at 2025-11-28 08:00:01 UTC; d; e at 2025-11-28 09:00:05 UTC"
    assert earlier.what.startswith("1 node is lost: Ray found it dead more than an hour ago, and no")
    assert earlier.evidence == "c at 2025-11-28 07:59:59 UTC"


def test_without_lost_nodes_nothing_is_reported() -> None:
    assert list(comparison.lost_nodes([])) == []


@pytest.mark.parametrize(("ago", "code"), [(60.0, 1), (7200.0, 0), (None, 1)])
def test_doctor_prints_lost_nodes_and_fails_for_recent_ones(
    ago: float | None, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process_table, "gcs_address", lambda _: "head:6379")
    lost = LostNode("10.0.0.3", ended=None if ago is None else time.time() - ago)
    monkeypatch.setattr(cluster, "collect_from_nodes", lambda *_: ([], [lost]))
    assert main(["doctor", "--json"]) == code
    [finding] = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["id"], finding["evidence"][:8], finding["node"]) == ("lost-nodes", "10.0.0.3", "")
    assert main(["doctor", "--all"]) == code
    assert "10.0.0.3" in capsys.readouterr().out
