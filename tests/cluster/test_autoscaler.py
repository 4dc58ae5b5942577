"""A run for which there is no room on a cluster whose nodes join when a placement group is pending."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from rlhf_stack import placement
from rlhf_stack.config import env_vars
from rlhf_stack.placement import Engines, Group, PlacementError, Request, reservation
from rlhf_stack.placement.demand import Demand

ray = pytest.importorskip("ray")

MEGABYTE = 1 << 20
SECONDS = 180
REQUEST = Request((Group("actor", 1, 2),), Engines(1, 2))


def pending():
    """Return the bundles of the placement groups that Ray cannot place."""
    groups = ray.util.placement_group_table().values()
    return [list(group["bundles"].values()) for group in groups if group["state"] == "PENDING"]


@pytest.fixture
def cluster():
    """Start a head without GPUs."""
    from ray.cluster_utils import Cluster

    running = Cluster()
    try:
        running.add_node(num_cpus=1, num_gpus=0, object_store_memory=80 * MEGABYTE, include_dashboard=False)
        ray.init(address=running.address, log_to_driver=False)
        yield running
    finally:
        ray.shutdown()
        running.shutdown()


def add_node(cluster, number):
    """Add a node with two GPUs."""
    cluster.add_node(
        num_cpus=4, num_gpus=2, object_store_memory=80 * MEGABYTE, node_ip_address=f"127.0.2.{number}"
    )


@pytest.mark.timeout(SECONDS)
def test_a_run_waits_for_the_nodes_that_an_autoscaler_adds(cluster, monkeypatch):
    monkeypatch.setenv(env_vars.AUTOSCALE, "1")
    with ThreadPoolExecutor(1) as pool:
        reserving = pool.submit(placement.reserve, REQUEST)
        while not (demand := pending()):
            assert not reserving.done(), reserving.exception()
            time.sleep(0.05)
        assert demand == [[{"GPU": 2.0, "CPU": 2.0}, {"GPU": 1.0, "CPU": 1.0}, {"GPU": 1.0, "CPU": 1.0}]]
        for number in (1, 2):
            add_node(cluster, number)
        assert sorted(reserving.result()) == ["actor", "engines"]
    assert pending() == []


@pytest.mark.timeout(SECONDS)
@pytest.mark.usefixtures("cluster")
def test_without_new_nodes_the_run_ends_at_the_deadline(monkeypatch):
    monkeypatch.setenv(env_vars.AUTOSCALE, "1")
    monkeypatch.setenv(env_vars.PLACEMENT_TIMEOUT, "3")
    with pytest.raises(PlacementError, match="GPU"):
        placement.reserve(REQUEST)
    assert pending() == []


@pytest.mark.timeout(SECONDS)
@pytest.mark.usefixtures("cluster")
def test_no_autoscaler_is_asked_unless_the_user_allows_it(monkeypatch):
    monkeypatch.setattr(Demand, "request_nodes", None)  # a call is a TypeError
    with pytest.raises(PlacementError, match="GPU"):
        placement.reserve(REQUEST)


@pytest.mark.timeout(SECONDS)
def test_a_run_waits_for_gpus_that_an_ending_job_holds(cluster, monkeypatch):
    monkeypatch.setenv(env_vars.PLACEMENT_TIMEOUT, "100")
    add_node(cluster, 1)
    other = ray.util.placement_group([{"GPU": 2}])
    assert other.wait(60)
    ended = []

    def end_later():
        time.sleep(reservation.SETTLE_SECONDS + 2)  # a job that takes longer to end than Ray's view is stale
        ended.append(True)
        ray.util.remove_placement_group(other)

    threading.Thread(target=end_later, daemon=True).start()
    groups = placement.reserve(Request((Group("actor", 1, 2),)))
    assert ended
    assert list(groups) == ["actor"]
