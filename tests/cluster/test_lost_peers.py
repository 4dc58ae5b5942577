"""Nodes that die, or actors that stall, while others wait for them: who it is is said, with what was done."""

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
ASKED = 5  # times, about once a second, before an engine knows that a transfer has failed
BUCKET = "the engines to load bucket 2 of 9 (lm_head.weight, 4096 bytes) over gloo"


class Engine:
    """An engine of two workers."""

    def __init__(self):
        startup.begin(3)
        startup.report_step("model loaded", 0, 1.0)
        startup.report_step("model loaded", 1, 1.0)

    def work(self):
        time.sleep(600)


class Stranger:
    """An actor that has not said who it is."""

    def work(self):
        time.sleep(600)


class Told:
    """An engine whose transfer has failed, as its worker says a while after."""

    def __init__(self, text):
        self._text, self._asked = text, 0

    def sync_error(self):
        self._asked += 1
        return self._text if self._asked > ASKED else None


class Rank:
    """A rank of the trainer, or what drives its ranks."""

    def __init__(self):
        actor_registry.register_rank(self, 0)

    def up(self):
        """Nothing, as soon as it has started."""

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
        """Be ``rank`` of the group, whose first listens on ``port``."""
        import torch.distributed as dist

        actor_registry.register_rank(self, rank)
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)

    def meet(self):
        import torch.distributed as dist

        dist.barrier()


@pytest.fixture
def lose():
    """A node with actors, and what ends it."""
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
    """An actor on the node that stays or on the one that dies, once it is up."""
    made = ray.remote(num_cpus=0, resources={DIES if doomed else STAYS: 1})(kind).remote(*arguments)
    ray.get(made.__ray_ready__.remote(), timeout=60)
    return made


def said(waiting, lose):
    """The error that ``waiting`` ends with when the node is lost while it waits."""
    with suppress(ray.exceptions.GetTimeoutError):
        ray.get(waiting, timeout=2)
    lose()
    with pytest.raises(actor_registry.PeerError) as raised, actor_registry.translate_actor_errors():
        ray.get(waiting, timeout=60)
    return str(raised.value)


@pytest.mark.timeout(180)
def test_an_engine_whose_node_dies_in_generation_is_named(lose):
    controller, engine = start(Rank), start(Engine, doomed=True)
    error = said(controller.generate.remote(engine), lose)
    assert error.startswith(f"engine 3 on {NODE} with its rank 0, rank 1 ")
    assert "\n" not in error


@pytest.mark.timeout(180)
def test_an_engine_whose_node_dies_in_a_sync_is_named_with_bucket_and_backend(lose):
    trainer, engine = start(Rank), start(Engine, doomed=True)
    error = said(trainer.sync.remote(engine), lose)
    assert error.startswith(f"weight sync 4 over gloo: waiting for {BUCKET}: engine 3 on {NODE} with its ")


@pytest.mark.timeout(180)
def test_a_rank_whose_node_dies_in_a_sync_is_named_with_what_engines_say_of_the_bucket(lose):
    text = "weight sync, rank 1 on 127.0.0.1, gloo, bucket 2 of 9: rank 0 (the trainer) does not answer"
    controller, rank, engine = start(Rank), start(Rank, doomed=True), start(Told, text)
    error = said(controller.train.remote(rank, engine), lose)
    assert error.startswith(f"rank 0 of Rank on {NODE} ")
    assert error.endswith(f"; {text}")


@pytest.mark.timeout(180)
def test_a_rank_whose_node_dies_in_a_collective_of_the_trainer_is_named(lose):
    members = [start(Member), start(Member, doomed=True)]
    port = free_port()
    ray.get([member.join.remote(port, rank) for rank, member in enumerate(members)], timeout=60)
    error = said(members[0].meet.remote(), lose)
    assert error.startswith(f"rank 1 of Member on {NODE} died, and others were cut off: ")


@pytest.mark.timeout(180)
def test_an_engine_that_stalls_is_named_with_its_node(lose, monkeypatch):
    del lose
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "1")
    engine = start(Engine, doomed=True)
    with pytest.raises(sync.SyncError) as raised:
        sync.wait_for_engine_results([engine.work.remote()], BUCKET)
    assert str(raised.value) == (
        f"waited 1 s for {BUCKET}; engines [0] of 1 did not answer (deadline: {env_vars.SYNC_TIMEOUT}): "
        f"engine 3 on {NODE} with its rank 0, rank 1"
    )


@pytest.mark.timeout(180)
def test_an_actor_that_nobody_knows_has_the_name_and_the_address_that_ray_knows(lose):
    controller, other = start(Rank), start(Stranger, doomed=True)
    assert said(controller.generate.remote(other), lose).startswith("Stranger on ")
