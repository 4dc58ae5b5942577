"""Several trainer ranks that send to the same engine workers, each its share of the buckets, over gloo."""

import os
import signal
from dataclasses import astuple

import pytest
import torch
from ports import free_port
from ranks import DTYPES, FORK, LIMIT, are_equal, flip_last_bits, weights
from rlhf_stack import sync
from rlhf_stack.config import env_vars
from rlhf_stack.sync import gloo, membership
from rlhf_stack.sync.buckets import Share, plan_buckets
from rlhf_stack.sync.encoding import CHANGED, FULL, KEPT
from rlhf_stack.sync.engine_parameters import parameter_spec
from rlhf_stack.sync.receiving import receive
from rlhf_stack.sync.sending import new_sender
from trained import SECTIONS, assert_one_policy, assert_trained

SOURCES, WORKERS = 3, 2
SECONDS = 400
ALL_APART, WITH_WORKERS, ONE_NODE = "12345", "12311", "11111"  # the last part of each process's address


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
        return dict(self.results.get(timeout=200) for _ in range(count))


def each_sync():
    """Yield encoding and weights of each sync: of each dtype new ones twice, and each with last bits flipped.

    The last encoding lets nodes free what they keep.
    """
    for dtype in DTYPES:
        for seed, (first, second) in enumerate([(KEPT, CHANGED), (CHANGED, FULL)]):
            parameters = weights(dtype, seed)
            yield first, parameters
            flip_last_bits(parameters)
            yield second, parameters


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

    receive(groups, content, LIMIT, torch.device("cpu"), load, parameters[0][1].dtype, encoding)
    return held


@pytest.mark.timeout(240)
@pytest.mark.parametrize("nodes", [ALL_APART, WITH_WORKERS, ONE_NODE])
def test_each_source_sends_a_share_and_every_bit_arrives_in_each_dtype_layout_and_encoding(nodes):
    def send(rank, group):
        return [send_share(rank, group, parameters, encoding) for encoding, parameters in each_sync()]

    def take(groups):
        equal = []
        for encoding, parameters in each_sync():
            held = receive_all(groups, parameters, encoding)
            equal.append(list(held) == list(dict(parameters)) and are_equal(held, parameters))
        return equal

    with Processes(nodes, send, take) as processes:
        found = processes.answers()
    assert [found[SOURCES + worker] for worker in range(WORKERS)] == [[True] * 4 * len(DTYPES)] * WORKERS
    buckets = plan_buckets([parameter_spec(*each) for each in weights(DTYPES[0])], LIMIT)
    sizes = [sum(spans[-1].end - spans[0].begin for spans in bucket.parts()) for bucket in buckets]
    shares = [sum(sizes[source::SOURCES]) for source in range(SOURCES)]
    assert [found[source][0] for source in range(SOURCES)] == shares


@pytest.mark.timeout(200)
def test_fewer_buckets_than_sources_are_sent_by_the_first_ones():
    parameters = weights(torch.bfloat16)[:1]

    def send(rank, group):
        return send_share(rank, group, parameters, FULL)

    def take(groups):
        return are_equal(receive_all(groups, parameters, FULL), parameters)

    with Processes(ALL_APART, send, take) as processes:
        found = processes.answers()
    assert [found[SOURCES + worker] for worker in range(WORKERS)] == [True] * WORKERS
    assert [found[source] > 0 for source in range(SOURCES)] == [True, False, False]


@SECTIONS  # in torch 2.3 another source ends at its own deadline; OpenRLHF 0.5 has one source
@pytest.mark.timeout(200)
@pytest.mark.parametrize("encodings", [(FULL,), (KEPT, CHANGED)])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_source_that_is_lost_ends_the_sync_on_all_other_ranks(monkeypatch, how, encodings):
    """Engine workers name it. Other sources have no connection to it: workers report it to them.

    At a stopped one they reach the deadline at the same time. A run then ends with the error of an engine.
    """
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "12")

    def parameters(content):
        return [(f"w{i}", torch.full((LIMIT,), content, dtype=torch.uint8)) for i in range(8 * SOURCES)]

    def send(rank, group):
        for index, encoding in enumerate(encodings):
            victim = 1 if encoding == encodings[-1] else None

            def reach(number, victim=victim):
                if rank == victim == number:
                    os.kill(os.getpid(), how)

            send_share(rank, group, parameters(index), encoding, reach)

    def take(groups):
        for encoding in encodings:
            receive_all(groups, parameters(0), encoding)

    with Processes(ALL_APART, send, take) as processes:
        found = processes.answers(SOURCES + WORKERS - 1)
    assert set(found) == {0, 2, 3, 4}
    for process, error in found.items():
        assert isinstance(error, sync.SyncError)
        if process >= SOURCES or how == signal.SIGKILL:
            assert "rank 0 (the trainer) on 127.0.0.2 does not answer" in str(error)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_source_that_is_lost_while_its_group_joins_is_named(monkeypatch, how):
    """Engine workers name it. They never reach the next source, which names them.

    Rank 0, whose group is complete, waits for the engines' calls in a run.
    """
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "10")
    shared = gloo.share_node_buffers

    def lost(members):
        if members.rank == 0 and members.address == "127.0.0.2":
            os.kill(os.getpid(), how)
        return shared(members)

    monkeypatch.setattr(gloo, "share_node_buffers", lost)
    with Processes(ALL_APART, lambda *_: "joined", lambda _: "joined") as processes:
        found = processes.answers(SOURCES + WORKERS - 1)
    assert set(found) == {0, 2, 3, 4}
    assert found[0] == "joined"
    assert isinstance(found[2], sync.SyncError)
    assert "ranks [1, 2] of 3 did not join within 10 s" in str(found[2])
    for worker in (3, 4):
        assert isinstance(found[worker], sync.SyncError)
        lost_at = "rank 0 at 127.0.0.2 has stopped waiting or does not answer"
        assert lost_at in str(found[worker])


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
