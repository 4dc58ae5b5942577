"""Lost or stalled actors while others wait: the error names the actor and the operation."""

import socket
import sys
import time
from contextlib import suppress

import pytest
from ports import free_port
from rlhf_stack import sync
from rlhf_stack.cluster import actor_registry
from rlhf_stack.config import env_vars
from rlhf_stack.engine import startup

ray = pytest.importorskip("ray")

MEGABYTE = 1 << 20
ADDRESS = "127.0.1.2"
NODE = f"node {socket.gethostname()} ({ADDRESS})"
STAYS, DIES = "stays", "dies"  # resources of the two nodes
QUERIES = 5  # about one per second, before an engine reports that a transfer failed
BUCKET = "the engines to load bucket 2 of 9 (lm_head.weight, 4096 bytes) over gloo"


class Engine:
    """An engine of two workers."""

    def __init__(self):
        startup.begin(3)
        startup.report_step("model loaded", 0, 1.0)
        startup.report_step("model loaded", 1, 1.0)

    def work(self):
        time.sleep(600)


class Unregistered:
    """An actor without a record in the registry."""

    def work(self):
        time.sleep(600)


class FailedEngine:
    """An engine whose transfer has failed, which it reports after `QUERIES` queries."""

    def __init__(self, text):
        self._text, self._queries = text, 0

    def sync_error(self):
        self._queries += 1
        return self._text if self._queries > QUERIES else None


class Rank:
    """A rank of the trainer, or the controller of its ranks."""

    def __init__(self):
        actor_registry.register_rank(self, 0)

    def up(self):
        """Return once the actor has started."""

    def work(self):
        time.sleep(600)

    def generate(self, engine):
        ray.get(engine.work.remote())

    def sync(self, engine):
        with actor_registry.translate_actor_errors("weight sync 4 over gloo"):
            sync.wait_for_engine_results([engine.work.remote()], BUCKET)

    def train(self, rank, engine):
        sync.wait_for_sync([rank.work.remote()], [engine])


class Member(Rank):
    """A rank of a process group of two."""

    def join(self, port, rank):
        """Join as ``rank`` the group whose rank 0 listens on ``port``."""
        import torch.distributed as dist

        actor_registry.register_rank(self, rank)
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)

    def barrier(self):
        import torch.distributed as dist

        dist.barrier()


@pytest.fixture
def lose_node():
    """Start two nodes; yield a function that kills the second."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        size = {"num_cpus": 1, "object_store_memory": 80 * MEGABYTE}
        cluster.add_node(**size, include_dashboard=False, resources={STAYS: 9})
        ray.init(address=cluster.address, log_to_driver=False)
        node = cluster.add_node(**size, node_ip_address=ADDRESS, resources={DIES: 9})
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        yield lambda: cluster.remove_node(node, allow_graceful=False)
    finally:
        ray.shutdown()
        cluster.shutdown()


def start(kind, *arguments, doomed=False):
    """Start an actor on the node that stays, or on the one that dies, and wait until it is up."""
    actor = ray.remote(num_cpus=0, resources={DIES if doomed else STAYS: 1})(kind).remote(*arguments)
    ray.get(actor.__ray_ready__.remote(), timeout=60)
    return actor


def error_on_loss(waiting, lose_node):
    """Return the error with which ``waiting`` ends when the node is lost."""
    with suppress(ray.exceptions.GetTimeoutError):
        ray.get(waiting, timeout=2)
    lose_node()
    with pytest.raises(actor_registry.PeerError) as raised, actor_registry.translate_actor_errors():
        ray.get(waiting, timeout=60)
    return str(raised.value)


@pytest.mark.timeout(180)
def test_engine_lost_in_generation_is_named(lose_node):
    controller, engine = start(Rank), start(Engine, doomed=True)
    error = error_on_loss(controller.generate.remote(engine), lose_node)
    assert error.startswith(f"engine 3 on {NODE} with its rank 0, rank 1 ")
    assert "\n" not in error


@pytest.mark.timeout(180)
def test_engine_lost_in_a_sync_is_named_with_bucket_and_backend(lose_node):
    trainer, engine = start(Rank), start(Engine, doomed=True)
    error = error_on_loss(trainer.sync.remote(engine), lose_node)
    assert error.startswith(f"weight sync 4 over gloo: waiting for {BUCKET}: engine 3 on {NODE} with its ")


@pytest.mark.timeout(180)
def test_rank_lost_in_a_sync_is_named_with_the_engines_error(lose_node):
    text = "weight sync, rank 1 on 127.0.0.1, gloo, bucket 2 of 9: rank 0 (the trainer) does not answer"
    controller, rank, engine = start(Rank), start(Rank, doomed=True), start(FailedEngine, text)
    error = error_on_loss(controller.train.remote(rank, engine), lose_node)
    assert error.startswith(f"rank 0 of Rank on {NODE} ")
    assert error.endswith(f"; {text}")


@pytest.mark.timeout(180)
def test_rank_lost_in_a_trainer_collective_is_named(lose_node):
    members = [start(Member), start(Member, doomed=True)]
    port = free_port()
    ray.get([member.join.remote(port, rank) for rank, member in enumerate(members)], timeout=60)
    error = error_on_loss(members[0].barrier.remote(), lose_node)
    assert error.startswith(f"rank 1 of Member on {NODE} died, and others were cut off: ")


@pytest.mark.timeout(180)
def test_stalled_engine_is_named_with_its_node(lose_node, monkeypatch):
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "1")
    engine = start(Engine, doomed=True)
    with pytest.raises(sync.SyncError) as raised:
        sync.wait_for_engine_results([engine.work.remote()], BUCKET)
    assert str(raised.value) == (
        f"waited 1 s for {BUCKET}; engines [0] of 1 did not answer (deadline: {env_vars.SYNC_TIMEOUT}): "
        f"engine 3 on {NODE} with its rank 0, rank 1"
    )


@pytest.mark.timeout(180)
def test_unregistered_actor_has_rays_name_and_address(lose_node):
    controller, other = start(Rank), start(Unregistered, doomed=True)
    assert error_on_loss(controller.generate.remote(other), lose_node).startswith("Unregistered on ")
