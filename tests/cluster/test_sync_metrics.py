"""The metrics of a sync are in those that Ray's node exports for Prometheus."""

import time

import pytest
import ray
from rlhf_stack.cluster import run_metrics
from rlhf_stack.diagnostics.monitor import metrics
from rlhf_stack.sync import report
from rlhf_stack.telemetry.throughput import Work

SECONDS = 90


@ray.remote
class Trainer:
    """Reports a sync from an actor, as the trainer's rank 0 does."""

    def report(self):
        worker = {"rank": 1, "who": "rank 1 on 10.0.0.2", "seconds": 2.0, "loading": 0.5, "waiting": 1.5}
        answers = {0: {"ranks": [worker], "work": Work(900, 3.0)}}
        return report.report_sync(0, "gloo", 5_000_000_000, 2.0, answers, 50_000_000)


def exported(node):
    """Return our samples by name; none if the node is too busy to answer."""
    endpoint = (node["NodeManagerAddress"], node["MetricsExportPort"])
    return {one.name: one for one in metrics.scrape([endpoint], 10) if one.name.startswith("ray_rlhf_stack_")}


@pytest.fixture
def node(monkeypatch):
    monkeypatch.setenv("RAY_metrics_report_interval_ms", "500")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    yield ray.nodes()[0]
    ray.shutdown()


@pytest.mark.timeout(3 * SECONDS + 60)
def test_a_sync_is_in_the_metrics_of_the_node(node):
    fields = ray.get((trainer := Trainer.remote()).report.remote())
    assert fields["gigabytes_per_second"] == 2.5
    assert fields["slowest"]["who"] == "rank 1 on 10.0.0.2"
    names = {f"ray_{name}" for name in run_metrics.SYNC_METRICS}
    for _ in range(3):  # Ray's agent forgets a gauge that was scraped
        end = time.monotonic() + SECONDS
        found = {}
        while set(found) != names and time.monotonic() < end:
            found |= exported(node)
            time.sleep(0.2)  # before the next scrape
        assert set(found) == names
        assert found["ray_rlhf_stack_sync_gigabytes_per_second"].value == 2.5
        assert found["ray_rlhf_stack_engine_tokens_per_second"].value == 300
    del trainer
    assert found["ray_rlhf_stack_sync_seconds"].tags["backend"] == "gloo"
