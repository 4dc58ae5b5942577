"""A trace of each training step, sent to the OTLP collector of the standard OTEL_ variables, if one is set.

A span "training step" has a child for each phase whose seconds OpenRLHF 0.11 logs with the step. Their ends
follow from the order of the phases, which is that of a synchronous step: in asynchronous training only the
durations are right. Ray's own tracing is another matter, and not used.
"""

import functools
import os
import time
from collections.abc import Mapping
from typing import Any

from rlhf_stack.telemetry import run_log

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PREFIX, TOTAL = "timing/", "timing/step_total"
ORDER = ("generation", "make_experience", "ppo_train", "broadcast")
NANOSECONDS = 1_000_000_000


def record(number: int, logs: Mapping[str, float]) -> None:
    """Send the trace of step ``number``, which has just ended; nothing without an endpoint or seconds."""
    if TOTAL not in logs or not any(os.environ.get(name) for name in ENDPOINTS):
        return
    tracer = _tracer()
    if tracer is None:
        return
    from opentelemetry.trace import set_span_in_context

    end = time.time_ns()
    at = end - int(logs[TOTAL] * NANOSECONDS)
    step = tracer.start_span("training step", start_time=at, attributes={"step": number})
    for name in ORDER:
        if (seconds := logs.get(PREFIX + name, 0.0)) > 0:
            span = tracer.start_span(name, set_span_in_context(step), start_time=at)
            at += int(seconds * NANOSECONDS)
            span.end(at)
    step.end(end)


@functools.cache
def _tracer() -> Any:
    """The tracer of this process; None, after a warning, without the packages of OpenTelemetry."""
    grpc = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") == "grpc"
    try:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        if grpc:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        else:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        run_log.warning(f"no traces are sent: {error}")
        return None
    provider = TracerProvider()  # its resource is that of OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider.get_tracer("rlhf_stack")
