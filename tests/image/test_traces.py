"""The trace of a training step, as a collector in the same process receives it."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("opentelemetry.sdk", reason="this image has no OpenTelemetry")

STEP = {"timing/step_total": 4.0, "timing/generation": 2.0, "timing/ppo_train": 1.5, "timing/broadcast": 0.25}
PROGRAM = """
import http.server, json, os, sys, threading

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

bodies = []


class Collector(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


server = http.server.HTTPServer(("127.0.0.1", 0), Collector)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ |= {
    "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
    "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
    "OTEL_SERVICE_NAME": "a-run",
}
from rlhf_stack.telemetry import events, traces

events.step(7, json.loads(sys.argv[1]))
traces._tracer().span_processor.shutdown()  # sends what is left
requests = [ExportTraceServiceRequest.FromString(body) for body in bodies]
resources = [resource for request in requests for resource in request.resource_spans]
spans = [span for resource in resources for scope in resource.scope_spans for span in scope.spans]
root = next(span for span in spans if not span.parent_span_id)
print(json.dumps({
    "services": [
        item.value.string_value
        for resource in resources
        for item in resource.resource.attributes
        if item.key == "service.name"
    ],
    "step": root.attributes[0].value.int_value,
    "seconds": {
        span.name: round((span.end_time_unix_nano - span.start_time_unix_nano) / 1e9, 3) for span in spans
    },
    "inside": all(
        span.parent_span_id == root.span_id
        and root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        and span.end_time_unix_nano <= root.end_time_unix_nano
        for span in spans
        if span is not root
    ),
}))
"""


def test_a_step_and_its_phases_are_sent() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(STEP)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "services": ["a-run"],
        "step": 7,
        "seconds": {"training step": 4.0, "generation": 2.0, "ppo_train": 1.5, "broadcast": 0.25},
        "inside": True,
    }
