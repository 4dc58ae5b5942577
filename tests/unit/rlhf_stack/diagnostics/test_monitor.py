"""rlhf_stack.diagnostics.monitor: the state of a run, from its events, metrics and placement groups."""

import http.server
import json
import re
import socketserver
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlhf_stack.cli.commands import top
from rlhf_stack.cli.main import main
from rlhf_stack.cluster.run_metrics import METRICS
from rlhf_stack.diagnostics.monitor import metrics, state
from rlhf_stack.diagnostics.monitor.metrics import Sample

from scripts.paths import ROOT
from tests.unit.stub_server import serving

EXPORTED = """# HELP ray_rlhf_stack_engine_tokens_per_second Tokens/s of an engine since the sync before.
# TYPE ray_rlhf_stack_engine_tokens_per_second gauge
ray_rlhf_stack_engine_tokens_per_second{Component="core_worker",engine="0",Version="2.55.0"} 300.0
ray_rlhf_stack_engine_tokens_per_second{Component="core_worker",engine="1"} 100.0
ray_rlhf_stack_sync_gigabytes_per_second{Backend="gloo"} 2.5
ray_node_gram_used{GpuIndex="0",ip="10.0.0.2"} 1024.0
ray_node_gram_available{GpuIndex="0",ip="10.0.0.2"} 3072.0
ray_node_gram_used{GpuIndex="1",ip="10.0.0.2"} NaN
ray_rlhf_stack_engine_restarts{engine="0"} 3.0
ray_rlhf_stack_recovery_seconds{run="run"} 12.5
ray_rlhf_stack_weight_version{run="run"} 6.0
odd line
"""
EVENTS: list[dict[str, Any]] = [
    {"event": "phase", "name": "started"},
    {"event": "phase", "name": "models up"},
    {"event": "engine", "engine": 0, "ranks": [{"rank": 0, "host": "a", "gpu": "GPU-1"}], "straddles": False},
    {"event": "engine", "engine": 2, "ranks": [{"rank": 0, "host": "b", "gpu": "GPU-2"}], "straddles": False},
    {"event": "sync", "index": 0, "version": 7, "backend": "gloo", "gigabytes_per_second": 1.5},
    {"event": "step", "step": 7, "reward": 0.25},
    {"event": "engine restart", "engine": 2, "restarts": 2},
    {"event": "recovered", "seconds": 12.5},
    {"event": "recovered", "seconds": 18.0},
]
BUNDLE = {"GPU": 4.0, "CPU": 1.0}
REASON = {"scheduling_state": "NO_RESOURCES"}
GROUPS: dict[str, dict[str, Any]] = {
    "aa": {"state": "PENDING", "bundles": {0: BUNDLE, 1: BUNDLE}, "stats": REASON},
    "bb": {"state": "CREATED", "bundles": {0: {"GPU": 1.0}}, "stats": {}},
}
SAMPLES = list(metrics.parse("10.0.0.2", EXPORTED))


def test_samples_have_their_tags_and_their_node() -> None:
    assert SAMPLES[0] == Sample(
        "10.0.0.2",
        "ray_rlhf_stack_engine_tokens_per_second",
        {"component": "core_worker", "engine": "0", "version": "2.55.0"},
        300.0,
    )
    assert len(SAMPLES) == 9


def test_events_of_a_former_attempt_do_not_count() -> None:
    """`submit --restarts` continues with fewer engines in the same folder of events."""
    former: list[dict[str, Any]] = [
        {"event": "phase", "name": "started"},
        {"event": "step", "step": 200, "reward": 0.9},
        {"event": "engine", "engine": 3, "ranks": []},
        {"event": "engine restart", "engine": 3, "restarts": 2},
        {"event": "recovered", "seconds": 300.0},
    ]
    assert state.run_state([*former, *EVENTS], SAMPLES, GROUPS) == state.run_state(EVENTS, SAMPLES, GROUPS)
    now = state.run_state([*former, {"event": "phase", "name": "started"}], [], {})
    assert (now.phase, now.step, now.engines, now.lost_seconds) == ("started", None, (), 0.0)


def test_samples_of_gpus_are_kept_between_two_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    scraped = [[SAMPLES[3], SAMPLES[0]], []]
    monkeypatch.setattr(metrics, "scrape", lambda *_: scraped.pop(0))
    monkeypatch.setattr(top, "SCRAPE_PAUSE_SECONDS", 0.0)
    gpus = top.GpuSamples()
    assert [gpus.now([("10.0.0.2", 1)]) for _ in range(2)] == [[SAMPLES[3]]] * 2
    monkeypatch.setattr(metrics, "scrape", lambda *_: [])
    assert gpus.now([("10.0.0.3", 1)]) == []


def test_the_state_of_a_run() -> None:
    now = state.run_state(EVENTS, SAMPLES, GROUPS)
    assert (now.phase, now.step, now.reward, now.sync) == ("models up", 7, 0.25, 1.5)
    assert [(one.index, one.tokens_per_second, one.ratio) for one in now.engines] == [
        (0, 300.0, 1.5),
        (1, 100.0, 0.5),
        (2, None, None),
    ]
    assert ([one.restarts for one in now.engines], now.lost_seconds) == ([3, 0, 2], 30.5)
    assert now.weight_version == 7
    assert now.engines[0].places == ("a GPU-1",)
    assert [(gpu.node, gpu.index, gpu.used, gpu.total) for gpu in now.gpus] == [
        ("10.0.0.2", "0", 1 << 30, 4 << 30)
    ]
    assert [(one.id, one.bundles, one.reason) for one in now.waiting] == [
        ("aa", ("2 x {CPU 1, GPU 4}",), "NO_RESOURCES")
    ]


def test_without_events_sync_rate_and_version_come_from_metrics() -> None:
    now = state.run_state([], SAMPLES, {})
    assert (now.phase, now.step, now.sync, now.weight_version) == (None, None, 2.5, 6)


def test_without_data_the_state_is_unknown() -> None:
    assert state.run_state([], [], {}) == state.RunState(None, None, None, None, (), (), ())


@pytest.mark.parametrize(
    "event",
    [
        {"event": "phase"},
        {"event": "phase", "name": 1},
        {"event": "step"},
        {"event": "step", "step": "x"},
        {"event": "step", "step": True},
        {"event": "step", "step": 1, "reward": "x"},
        {"event": "step", "step": 10**400},
        {"event": "sync", "version": "x"},
        {"event": "sync", "gigabytes_per_second": []},
        {"event": "engine", "engine": 0},
        {"event": "engine", "engine": "x", "ranks": []},
        {"event": "engine", "engine": 0, "ranks": [1]},
        {"event": "engine restart", "engine": 0},
        {"event": "engine restart", "engine": 0, "restarts": None},
        {"event": "recovered"},
        {"event": "recovered", "seconds": "x"},
        {"event": "unknown"},
    ],
    ids=str,
)
def test_a_malformed_event_is_skipped(event: dict[str, Any]) -> None:
    event = event | {"time": 1.0}
    assert state.run_state([*EVENTS, event], SAMPLES, GROUPS) == state.run_state(EVENTS, SAMPLES, GROUPS)


@pytest.mark.parametrize(
    "line",
    [
        *(
            f"{name} {value}"
            for name in (state.RESTARTS, state.VERSION)
            for value in ("NaN", "+Inf", "1e300")
        ),
        *(f'{state.RESTARTS}{{engine="{engine}"}} 1' for engine in ("", "x", "-1", "\u0665", "9" * 5000)),
        f'{state.TOKENS}{{engine="x"}} 1',
        f'{state.TOKENS}{{engine="0"}} NaN',
        f"{state.RECOVERY} NaN",
    ],
    ids=lambda line: line[:60],
)
def test_a_malformed_sample_is_skipped(line: str) -> None:
    """A version that is no number ended `top` as a defect."""
    samples = [*SAMPLES, *metrics.parse("a", line)]
    assert len(samples) == len(SAMPLES) + 1
    assert state.run_state(EVENTS, samples, GROUPS) == state.run_state(EVENTS, SAMPLES, GROUPS)


@given(st.text(max_size=300))
def test_any_text_can_be_parsed(text: str) -> None:
    state.run_state([], list(metrics.parse("a", text)), {})


@pytest.fixture
def exporter() -> Iterator[int]:
    """The port of a server that exports `EXPORTED`."""

    with serving(200, EXPORTED) as port:
        yield port


@pytest.mark.usefixtures("behind_proxy")
def test_a_node_is_asked_without_a_proxy(exporter: int) -> None:
    """`top` was empty."""
    assert len(metrics.scrape([("127.0.0.1", exporter)], 5.0)) == 9


def test_an_unresponsive_node_exports_nothing(exporter: int) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as closed:
        port = closed.server_address[1]
    assert len(metrics.scrape([("127.0.0.1", exporter), ("127.0.0.1", port)], 5.0)) == 9
    assert metrics.scrape([], 5.0) == []


LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "samples"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", 0),
        (b"\x00\x01\xff" * 100, 0),
        (b"", 0),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000, 0),
        (CHUNKED + b"9999\r\na 1\n", 0),
        (CHUNKED + b"no size\r\n", 0),
        (LENGTH + b"a 1\nb 2\nc 3.", 2),
        (LENGTH + b"a 1\n" * 100, 25),
    ],
    ids=["another server", "binary", "nothing", "header", "cut chunk", "no chunk", "cut body", "too long"],
)
def test_an_answer_that_is_none_exports_nothing(
    answer: bytes, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended `top` as a defect; of a cut answer the whole lines count."""
    monkeypatch.setattr(metrics, "MOST_BYTES", 101)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(4096)
            self.request.sendall(answer)

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = metrics.scrape([("127.0.0.1", server.server_address[1])], 5.0)
        server.shutdown()
    assert len(found) == samples


def test_the_dashboard_uses_only_exported_metrics() -> None:
    """tests/cluster/test_sync_metrics.py shows that a node exports these."""
    dashboard = json.loads((ROOT / "images" / "examples" / "grafana.json").read_text(encoding="utf-8"))
    queries = {target["expr"] for panel in dashboard["panels"] for target in panel["targets"]}
    names = {name for text in queries for name in re.findall(r"\bray_\w+", text)}
    assert names == {f"ray_{name}" for name in METRICS}
    grouped = {found for text in queries for found in re.findall(r"by \((\w+)\) \(ray_(\w+)\)", text)}
    assert grouped
    assert grouped <= {(label, name) for name, (_, label) in METRICS.items()}, "a label that no metric has"


def test_without_a_ray_node_top_reports_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rlhf_stack.cleanup.process_table.snapshot", list)
    assert main(["top", "--once"]) == 2
    assert "no Ray node runs on this machine" in capsys.readouterr().err
