"""Several trainer ranks that send to the same engine workers, each its share of the buckets, over gloo."""

import os
import signal
from dataclasses import astuple

import pytest
import torch
from ports import free_port
from ranks import FORK, LIMIT, random_bytes
from rlhf_stack import sync
from rlhf_stack.config import env_vars
from rlhf_stack.sync import membership
from rlhf_stack.sync.buckets import Share, plan_buckets
from rlhf_stack.sync.encoding import CHANGED, FULL, KEPT
from rlhf_stack.sync.engine_parameters import parameter_spec
from rlhf_stack.sync.receiving import receive
from rlhf_stack.sync.sending import new_sender
from trained import SECTIONS, assert_one_policy, assert_trained

SOURCES, WORKERS = 3, 2
SECONDS = 400
ALL_APART, WITH_WORKERS, ONE_NODE = "12345", "12311", "11111"  # the last part of each process's address
SIZES = ((3 << 20, 2), (70, 3), (0,), (LIMIT * 2 + 24,), (5000, 7), (1 << 20,))


class Processes:
    """A process for each trainer rank that sends and for each worker; it reports what it returns or raises.

    ``send`` gets the rank and its group, ``take`` gets a worker's groups.
    """

    def __init__(self, nodes, send, take):
        self.results = FORK.Queue()
        ports = [free_port() for _ in range(SOURCES)]

        def join(number, source, rank):
            membership._own_address = lambda *_: f"127.0.0.{nodes[number]}"
            where = f"127.0.0.{nodes[source]}", ports[source], rank, 1 + WORKERS
            return sync.create_group(*where, torch.device("cpu"), "gloo")

        def run(number):
            rank = max(0, number - SOURCES + 1)
            sources = range(SOURCES) if rank else [number]
            try:
                groups = [join(number, source, rank) for source in sources]
                found = take(groups) if rank else send(number, groups[0])
            except Exception as error:
                found = error
            self.results.put((number, found))
            signal.pause()  # until it is killed, with its groups

        self.all = [FORK.Process(target=run, args=(each,), daemon=True) for each in range(SOURCES + WORKERS)]

    def __enter__(self):
        for process in self.all:
            process.start()
        return self

    def __exit__(self, *_):
        for process in self.all:
            process.kill()
            process.join()

    def answers(self, count=SOURCES + WORKERS):
        return dict(self.results.get(timeout=100) for _ in range(count))


def weights(seed, sizes=SIZES):
    generator = torch.Generator().manual_seed(seed)
    return [(f"w{i}", random_bytes(torch.uint8, size, generator)) for i, size in enumerate(sizes)]


def send_share(rank, group, parameters, encoding, before=lambda _: None):
    """Send as trainer rank ``rank``; return the bytes."""
    specs = [parameter_spec(*each) for each in parameters]
    buckets = plan_buckets(specs, LIMIT)
    share = Share(rank, SOURCES).of(len(buckets))
    if rank >= share.count:
        return 0
    with group.syncing():
        sender = new_sender(group, encoding, buckets[rank :: share.count], in_place=True)
        for number, bucket in enumerate(buckets):
            if share.has(number):
                before(number)
                tensors = [parameters[span.index][1] for span in bucket.spans]
                sender.send(number // share.count, bucket, tensors)
        sender.finish()
    return sender.sent


def receive_all(groups, parameters, encoding):
    """Receive as an engine worker; return copies of what arrives, by name in that order."""
    content = [astuple(parameter_spec(*each)) for each in parameters]
    held = {}

    def load(views):
        held.update((name, view.clone()) for name, view in views)

    receive(groups, content, LIMIT, torch.device("cpu"), load, torch.uint8, encoding)
    return held


@pytest.mark.timeout(200)
@pytest.mark.parametrize("nodes", [ALL_APART, WITH_WORKERS, ONE_NODE])
def test_each_source_sends_a_share_and_all_bytes_arrive_in_each_encoding(nodes):
    steps = [(seed, encoding) for seed, encoding in enumerate((FULL, KEPT, CHANGED, CHANGED, FULL, KEPT))]

    def send(rank, group):
        return [send_share(rank, group, weights(seed), encoding) for seed, encoding in steps]

    def take(groups):
        equal = []
        for seed, encoding in steps:
            held = receive_all(groups, weights(seed), encoding)
            equal.append(
                list(held) == [name for name, _ in weights(seed)]
                and all(torch.equal(held[name], tensor) for name, tensor in weights(seed))
            )
        return equal

    with Processes(nodes, send, take) as processes:
        found = processes.answers()
    assert [found[SOURCES + worker] for worker in range(WORKERS)] == [[True] * len(steps)] * WORKERS
    buckets = plan_buckets([parameter_spec(*each) for each in weights(0)], LIMIT)
    sizes = [sum(spans[-1].end - spans[0].begin for spans in bucket.parts()) for bucket in buckets]
    shares = [sum(sizes[source::SOURCES]) for source in range(SOURCES)]
    assert [found[source][0] for source in range(SOURCES)] == shares


@pytest.mark.timeout(200)
def test_fewer_buckets_than_sources_are_sent_by_the_first_ones():
    def send(rank, group):
        return send_share(rank, group, weights(1, [(9, 5)]), FULL)

    def take(groups):
        held = receive_all(groups, weights(1, [(9, 5)]), FULL)
        return torch.equal(held["w0"], weights(1, [(9, 5)])[0][1])

    with Processes(ALL_APART, send, take) as processes:
        found = processes.answers()
    assert [found[SOURCES + worker] for worker in range(WORKERS)] == [True] * WORKERS
    assert [found[source] > 0 for source in range(SOURCES)] == [True, False, False]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_source_that_is_lost_ends_the_sync_on_all_other_ranks(monkeypatch, how):
    """Engine workers name it. Other sources have no connection to it: workers report it to them.

    At a stopped one they reach the deadline at the same time. A run then ends with the error of an engine.
    """
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "12")
    sizes = [(LIMIT,)] * 8 * SOURCES

    def send(rank, group):
        def reach(number):
            if rank == 1 and number == 1:
                os.kill(os.getpid(), how)

        return send_share(rank, group, weights(2, sizes), FULL, reach)

    def take(groups):
        return receive_all(groups, weights(2, sizes), FULL)

    with Processes(ALL_APART, send, take) as processes:
        found = processes.answers(SOURCES + WORKERS - 1)
    assert set(found) == {0, 2, 3, 4}
    for process, error in found.items():
        assert isinstance(error, sync.SyncError)
        if process >= SOURCES or how == signal.SIGKILL:
            assert "rank 0 (the trainer) on 127.0.0.2 does not answer" in str(error)


@SECTIONS
@pytest.mark.timeout(SECONDS + 40)
def test_both_ranks_of_a_run_send_shards_that_zero3_gathers_and_changed_elements(train):
    variables = {env_vars.SYNC_SOURCES: "2", env_vars.SYNC_BUCKET: "0.05", env_vars.SYNC_SPARSE: "on"}
    rate = "--actor.adam.lr", "1e-6"
    run = train("separate", (2, 2), 3, SECONDS, "--ds.zero_stage", "3", *rate, **variables)
    assert_trained(run, steps=3, backend="gloo", engines=1)
    assert_one_policy(run)
    assert [event["sources"] for event in run.of("sync")] == [2, 2, 2]
    assert [event["sent"] > 0.9 * event["bytes"] for event in run.of("sync")] == [True, False, False]
