"""GPU contention by upstream's unsafe barrier, with a real engine; test_training.py covers normal runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import replacing
from rlhf_stack.config import env_vars
from rlhf_stack.telemetry import events

UNSAFE = Path(__file__).with_name("unsafe_barrier.py")
SECONDS = 400


@pytest.mark.integration
@pytest.mark.carries("openrlhf==0.11.2")
@pytest.mark.timeout(SECONDS + 20)
def test_generating_while_a_rank_waits_on_the_same_gpu_is_an_error(tmp_path):
    """The engine generates without error while no rank waits."""
    directory = tmp_path / "events"
    done = subprocess.run(
        [sys.executable, str(UNSAFE), str(tmp_path)],
        env=os.environ
        | replacing.variables(tmp_path)
        | {env_vars.CHECK_COTENANCY: "1", env_vars.EVENTS: str(directory)},
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    violated = [event for event in events.read(directory) if event["event"] == "cotenancy violated"]
    assert violated
    assert violated[0]["collectives"][0].startswith("barrier of rank 1 ")
