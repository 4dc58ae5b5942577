"""rlhf_stack.telemetry.step_metrics: the seconds of the phases of a step."""

import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from rlhf_stack.config import env_vars
from rlhf_stack.telemetry import events, step_metrics


@pytest.fixture
def histogram(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """Replace Ray, to which this process is connected."""
    step_metrics._histogram.cache_clear()
    ray = MagicMock()
    ray.is_initialized.return_value = True
    for name in ("ray", "ray.util", "ray.util.metrics"):
        monkeypatch.setitem(sys.modules, name, ray)
    monkeypatch.delenv(env_vars.EVENTS, raising=False)
    return ray.Histogram  # type: ignore[no-any-return]


def test_the_phases_of_a_step_are_observed(histogram: MagicMock) -> None:
    events.step(1, {"timing/generation": 3.5, "timing/step_total": 12, "reward": 0.5, "timing/odd": -1.0})
    histogram.assert_called_once()
    assert histogram.call_args.args == ("rlhf_stack_step_phase_seconds",)
    assert histogram.call_args.kwargs["tag_keys"] == ("phase",)
    seen = [(call.args[0], call.kwargs["tags"]) for call in histogram.return_value.observe.call_args_list]
    assert seen == [(3.5, {"phase": "generation"}), (12.0, {"phase": "step_total"})]


def test_boundaries_increase() -> None:
    assert sorted(set(step_metrics.BOUNDARIES)) == step_metrics.BOUNDARIES


def test_without_a_connection_nothing_is_observed(histogram: MagicMock) -> None:
    sys.modules["ray"].is_initialized.return_value = False
    step_metrics.observe({"timing/generation": 1.0})
    histogram.assert_not_called()


def test_a_step_is_recorded_without_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setenv(env_vars.EVENTS, str(tmp_path))
    events.step(1, {"timing/generation": 1.0})
    assert events.read(tmp_path)[0]["timing/generation"] == 1.0
