"""Weights sent in buckets between real processes, and the errors when a rank does not answer."""

import os
import re
import signal
import time

import pytest
import torch
from ranks import (
    DTYPES,
    FOUR_NODES,
    LIMIT,
    ONE_NODE,
    TWO_NODES,
    WORLD,
    Ranks,
    arrive,
    described,
    errors_without,
    receive_all,
    send,
    weights,
)
from rlhf_stack import sync
from rlhf_stack.config import env_vars
from rlhf_stack.sync.buckets import plan_buckets
from rlhf_stack.sync.engine_parameters import parameter_spec


@pytest.mark.timeout(120)
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("nodes", [ONE_NODE, TWO_NODES, FOUR_NODES])
def test_every_dtype_and_shape_arrives_bit_for_bit_sync_after_sync(in_place, nodes):
    def exchange(rank, group):
        parameters = [weights(dtype, seed=number) for number, dtype in enumerate(DTYPES)]
        if rank == 0:
            return [send(group, sent, in_place=in_place) > 0 for sent in parameters]
        return [arrive(group, sent) for sent in parameters]

    with Ranks(exchange, nodes) as ranks:
        found = ranks.answers()
    assert found == dict.fromkeys(range(WORLD), [True] * len(DTYPES))


@pytest.mark.timeout(60)
def test_the_ranks_of_a_node_share_memory_and_each_node_has_its_own():
    def memory(_, group):
        part = group.buffers.for_bucket(1, 0)
        return (
            os.fstat(group.buffers._files[0]).st_ino if hasattr(group.buffers, "_files") else part.data_ptr()
        )

    def identities(nodes):
        with Ranks(memory, nodes) as ranks:
            found = ranks.answers()
        return [found[rank] for rank in range(WORLD)]

    assert len(set(identities(ONE_NODE))) == 1
    two = identities(TWO_NODES)
    assert two[0] == two[1] != two[2] == two[3]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("nodes", [ONE_NODE, TWO_NODES, FOUR_NODES])
def test_a_process_holds_two_buckets_during_a_sync_and_none_after_it(nodes):
    """Also for a parameter of ten buckets; the kernel's count of a node's shared memory includes both."""
    sizes = [1 << 20] * 3 + [10 * LIMIT] + [1 << 20] * 4
    parameters = [(f"w{index}", torch.ones(size, dtype=torch.uint8)) for index, size in enumerate(sizes)]

    def held(group):
        files = getattr(group.buffers, "_files", ())
        return sum(map(len, group.buffers._tensors.values())), sum(os.fstat(file).st_blocks for file in files)

    def exchange(rank, group):
        during = []
        for _ in range(2):
            if rank == 0:
                send(group, parameters, in_place=False, before=lambda _: during.append(held(group)[0]))
            else:
                receive_all(group, parameters, load=lambda _: during.append(held(group)[0]))
        group._members.exchange("all ranks have ended", "", time.monotonic() + 60)
        return max(during), held(group)

    with Ranks(exchange, nodes) as ranks:
        assert ranks.answers() == dict.fromkeys(range(WORLD), (2 * LIMIT, (0, 0)))


@pytest.mark.timeout(60)
def test_a_worker_reports_its_loading_time():
    parameters = weights(torch.bfloat16)

    def exchange(rank, group):
        if rank == 0:
            return send(group, parameters)
        return receive_all(group, parameters, load=lambda _: time.sleep(0.05 if rank == 2 else 0))

    with Ranks(exchange) as ranks:
        found = ranks.answers()
    buckets = plan_buckets([parameter_spec(*one) for one in parameters], LIMIT)
    ends = [bucket for bucket in buckets if bucket.spans[-1].size < LIMIT]
    assert 0 < len(ends) < len(buckets)
    assert found[2]["loading"] >= 0.05 * len(ends)
    assert found[2]["loading"] > found[1]["loading"]
    assert [found[rank]["who"] for rank in (1, 2, 3)] == [described(rank) for rank in (1, 2, 3)]


@pytest.mark.timeout(60)
def test_a_parameter_that_the_engine_would_round_is_refused(monkeypatch):
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "8")
    parameters = [("w", torch.ones(4, dtype=torch.bfloat16)), ("b", torch.ones(4))]

    def exchange(rank, group):
        return (send if rank == 0 else receive_all)(group, parameters)

    with Ranks(exchange) as ranks:
        found = ranks.answers()
    assert isinstance(found[0], sync.SyncError)
    for rank in range(WORLD):
        assert "b is float32 in the trainer and bfloat16 in the engine" in str(found[rank])


@pytest.mark.timeout(150)
def test_every_rank_reports_the_error_of_a_rank_that_cannot_load(monkeypatch):
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "600")  # must not be waited for
    parameters = [(f"w{index}", torch.ones(2 << 20, dtype=torch.uint8)) for index in range(60)]

    def load(rank, views):
        if rank == 2 and views[0][0] == "w7":
            raise ValueError("no such weight")

    def exchange(rank, group):
        if rank == 0:
            send(group, parameters)
        else:
            receive_all(group, parameters, load=lambda views: load(rank, views))

    with Ranks(exchange) as ranks:
        found = ranks.answers(seconds=120)
    assert isinstance(found[2], ValueError)
    for rank in (0, 1, 3):
        assert isinstance(found[rank], sync.SyncError)
        assert f"{described(2)}: ValueError: no such weight" in str(found[rank])


@pytest.mark.timeout(90)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(
    ("nodes", "victim"),
    [(ONE_NODE, 0), (ONE_NODE, 1), *((TWO_NODES, rank) for rank in range(WORLD)), (FOUR_NODES, 2)],
)
def test_every_other_rank_names_the_lost_one(monkeypatch, nodes, victim, how):
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "12")
    for error in errors_without(victim, how, nodes, count=100):
        assert re.search(r"gloo, bucket \d+ of 100 \(w\d+, 2097152 bytes\)", error), error
