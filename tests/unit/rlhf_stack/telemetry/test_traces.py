"""rlhf_stack.telemetry.traces: off by default, and a warning without OpenTelemetry.

What is sent is tested in the image, which has the packages: `tests/image/test_traces.py`.
"""

import sys

import pytest
from rlhf_stack.telemetry import traces

STEP = {"timing/step_total": 2.0, "timing/generation": 1.0}


@pytest.fixture(autouse=True)
def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide OpenTelemetry, as in an image that lacks it."""
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    traces._tracer.cache_clear()


@pytest.mark.parametrize(
    ("endpoint", "logs", "warnings"),
    [("http://10.0.0.1:4318", STEP, 1), ("http://10.0.0.1:4318", {"loss": 1.0}, 0), ("", STEP, 0)],
    ids=["no packages", "no seconds", "off"],
)
def test_a_trace_that_cannot_be_sent_is_one_warning(
    endpoint: str,
    logs: dict[str, float],
    warnings: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(traces.ENDPOINTS[1], endpoint)
    for number in range(3):
        traces.record(number, logs)
    assert len([one for one in caplog.messages if one.startswith("no traces are sent: ")]) == warnings
