"""`rlhf-stack top` shows a node's metrics and events, and the placement groups that wait for resources."""

import json
import os
import subprocess
import time

import pytest
import ray
from rlhf_stack.config import env_vars
from rlhf_stack.sync import report
from rlhf_stack.telemetry import events
from rlhf_stack.telemetry.throughput import Work

SECONDS = 120


@ray.remote
class Trainer:
    """Reports a sync from an actor, as the trainer's rank 0 does."""

    def report(self):
        worker = {"rank": 1, "who": "rank 1 on 10.0.0.2", "seconds": 2.0, "loading": 0.5, "waiting": 1.5}
        answers = {
            index: {"ranks": [worker], "work": Work(tokens, 3.0)} for index, tokens in ((0, 900), (1, 300))
        }
        return report.report_sync(0, "gloo", 5_000_000_000, 2.0, answers, 5_000_000_000)


@pytest.fixture
def node(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_metrics_report_interval_ms", "500")
    monkeypatch.setenv(env_vars.EVENTS, str(tmp_path))
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    yield
    ray.shutdown()


def top():
    done = subprocess.run(
        ["rlhf-stack", "top", "--json"], env=os.environ, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.usefixtures("node")
def test_the_reports_of_a_run_are_shown():
    trainer = Trainer.options(num_cpus=0).remote()
    ray.get(trainer.report.remote())
    events.phase("models up")
    events.step(3, {"reward": 0.5})
    group = ray.util.placement_group([{"GPU": 4, "CPU": 1}] * 2)
    end = time.monotonic() + SECONDS
    now = top()
    while not (now["engines"] and now["waiting"] and now["sync"]) and time.monotonic() < end:
        now = top()
    assert (now["schema"], now["phase"], now["step"], now["sync"]) == (
        "rlhf-stack/top/1",
        "models up",
        3,
        2.5,
    )
    assert [(one["tokens_per_second"], one["ratio"]) for one in now["engines"]] == [
        (300.0, 1.5),
        (100.0, 0.5),
    ]
    assert [one["bundles"] for one in now["waiting"]] == [["2 x {CPU 1, GPU 4}"]]
    ray.util.remove_placement_group(group)
