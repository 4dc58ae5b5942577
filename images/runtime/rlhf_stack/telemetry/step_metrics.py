"""The histogram of the phases of training steps, which Ray exports with its own metrics."""

import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

NAME = "rlhf_stack_step_phase_seconds"  # exported as ray_..._bucket, _sum and _count
BOUNDARIES = [0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0]  # seconds
PREFIX = "timing/"  # of the numbers that OpenRLHF 0.11 logs with a step


def observe(logs: Mapping[str, float]) -> None:
    """Add the seconds of each phase in the logs of a step, if this process is connected to Ray.

    The phases are upstream's: generation, make_experience, ppo_train, broadcast and step_total.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return
    for name, seconds in logs.items():
        if name.startswith(PREFIX) and seconds >= 0:
            _histogram().observe(seconds, tags={"phase": name.removeprefix(PREFIX)})


@cache
def _histogram() -> Any:
    from ray.util.metrics import Histogram

    text = "Seconds of the phases of training steps."
    return Histogram(NAME, description=text, boundaries=BOUNDARIES, tag_keys=("phase",))
