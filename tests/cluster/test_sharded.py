"""Syncs in which each worker copies only the shard that its loader reads."""

import re
import signal
from dataclasses import astuple

import pytest
import torch
from ranks import (
    FOUR_NODES,
    LIMIT,
    ONE_NODE,
    TWO_NODES,
    WORLD,
    Ranks,
    as_bits,
    errors_without,
    nothing,
    random_bytes,
    send,
)
from rlhf_stack import sync
from rlhf_stack.config import env_vars
from rlhf_stack.sync.encoding import CHANGED, FULL, KEPT
from rlhf_stack.sync.engine_parameters import parameter_spec
from rlhf_stack.sync.reads import Reads
from rlhf_stack.sync.receiving import receive

pytestmark = pytest.mark.carries("openrlhf==0.11.2")

DTYPES = [torch.bfloat16, torch.float32, torch.int8, torch.bool, torch.float8_e4m3fn]
HELD = {  # by parameter: its shape, and what a rank of a size holds of it
    "embed": ((3300, 1000), lambda whole, rank, size: whole.chunk(size)[rank]),  # of several buckets
    "column": ((96, 40), lambda whole, rank, size: whole.narrow(0, 96 // size * rank, 96 // size)),
    "row": ((1000, 3300), lambda whole, rank, size: whole[:, 3300 // size * rank :][:, : 3300 // size]),
    "copied": ((2, 24, 40), lambda whole, rank, size: whole[rank % 2]),  # as key and value heads of GQA
    "transposed": ((64, 96), lambda whole, rank, size: whole.t().chunk(size)[rank]),
    "computed": ((8, 16), lambda whole, rank, size: whole.view(torch.uint8).flip(0).chunk(size)[rank]),
    "every second": ((64, 30), lambda whole, rank, size: whole[rank::size, ::2]),
    "norm": ((333,), lambda whole, rank, size: whole),
    "scalar": ((), lambda whole, rank, size: whole),
    "empty": ((0, 4), lambda whole, rank, size: whole),
    "expert": ((32, 32), lambda whole, rank, size: whole if rank == 0 else None),
    "tied": ((32, 8), lambda whole, rank, size: None),
}

with Reads().recorded():  # before a fork and the deadline of a sync: torch imports for seconds at first use
    torch.empty(0)


def weights(dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return [(name, random_bytes(dtype, shape, generator)) for name, (shape, _) in HELD.items()]


class Worker:
    """A worker of an engine of ``size``, whose loader slices parameters, and copies the slices at the end."""

    def __init__(self, group, rank, size):
        self.group, self.rank, self.size, self.reads = group, rank, size, Reads()

    def slices(self, parameters):
        views = {name: HELD[name][1](whole, self.rank, self.size) for name, whole in parameters}
        return {name: view for name, view in views.items() if view is not None}

    def sync(self, parameters, encoding=FULL, before=nothing):
        """Receive; return the bytes that were copied, and the parameters of which wrong bits were loaded."""
        content = [astuple(parameter_spec(name, tensor)) for name, tensor in parameters]
        slices, device, dtype = {}, torch.device("cpu"), parameters[0][1].dtype

        def load(tensors):
            before(tensors)
            slices.update(self.slices(tensors))

        options = {"load_keeps": True, "reads": self.reads}
        report = receive([self.group], content, LIMIT, device, load, dtype, encoding, **options)
        with self.reads.recorded():
            held = {name: torch.empty_like(view).copy_(view) for name, view in slices.items()}
        self.reads.ended()
        expected = self.slices(parameters)
        equal = [name for name in held if torch.equal(as_bits(held[name]), as_bits(expected[name]))]
        return report["copied"], sorted(expected.keys() - equal)

    def needs(self, parameters):
        """The bytes of what this worker's loader reads: all of a parameter that it does not only slice."""
        views = self.slices(parameters) | {name: whole for name, whole in parameters if name == "computed"}
        return sum(view.nbytes for view in views.values())


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("nodes", "size"), [(FOUR_NODES, 2), (ONE_NODE, 4)])
def test_a_worker_copies_the_elements_that_it_loads_and_no_others(nodes, size):
    syncs = [FULL, FULL, KEPT, CHANGED, CHANGED]

    def exchange(rank, group):
        found = []
        for dtype in DTYPES:
            worker = Worker(group, (rank - 1) % size, size)
            for number, encoding in enumerate(syncs):
                parameters = weights(dtype, seed=number)
                if rank == 0:
                    send(group, parameters, encoding)
                else:
                    copied, wrong = worker.sync(parameters, encoding)
                    found.append((copied - worker.needs(parameters) if number else 0, wrong))
        return found

    with Ranks(exchange, nodes) as ranks:
        found = ranks.answers(seconds=110)
    for rank in range(1, WORLD):
        assert isinstance(found[rank], list), found
        copied = [extra for extra, _ in found[rank]]
        assert [wrong for _, wrong in found[rank]] == [[]] * len(copied)
        assert copied == [0] * len(copied)


@pytest.mark.timeout(60)
def test_a_loader_that_reads_other_elements_fails_and_the_next_sync_copies_all(monkeypatch):
    """A part of what it read before is no other element."""

    def exchange(rank, group):
        parameters, texts = weights(torch.bfloat16, 0), []
        worker = Worker(group, 1, 2)
        for (shard, size), forgets in [((1, 2), False), ((3, 4), False), ((0, 2), False), ((0, 2), True)]:
            worker.rank, worker.size = shard, size
            if rank == 0:
                send(group, parameters)
                continue
            worker.reads = Reads() if forgets else worker.reads
            try:
                texts.append(str(worker.sync(parameters)[1]))
            except sync.SyncError as error:
                texts.append(str(error))
        return texts

    monkeypatch.setitem(HELD, "norm", HELD["column"])
    for name in HELD.keys() - {"column", "norm"}:
        monkeypatch.delitem(HELD, name)
    with Ranks(exchange) as ranks:
        found = ranks.answers()
    for rank in range(1, WORLD):
        right, part, other, again = found[rank]
        assert right == part == again == "[]"
        assert "column: the engine's loader reads other elements than in earlier syncs" in other
        assert "RLHF_STACK_SYNC_SHARDED=off" in other


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("nodes", "victim", "how", "encodings"),
    [
        (TWO_NODES, 0, signal.SIGKILL, (FULL, FULL)),
        (TWO_NODES, 2, signal.SIGSTOP, (FULL, FULL)),
        (ONE_NODE, 3, signal.SIGKILL, (KEPT, CHANGED)),
        (FOUR_NODES, 2, signal.SIGSTOP, (KEPT, CHANGED)),
    ],
)
def test_every_other_rank_names_one_that_is_lost_while_shards_are_copied(
    monkeypatch, nodes, victim, how, encodings
):
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "12")
    count, workers = 20, {}
    for index in range(count):
        monkeypatch.setitem(HELD, f"w{index}", HELD["embed"])

    def take(group, parameters, encoding, load):
        is_first = not workers
        worker = workers.setdefault(group.rank, Worker(group, (group.rank - 1) % 2, 2))
        assert worker.reads.is_known != is_first
        worker.sync(parameters, encoding, load)

    for error in errors_without(victim, how, nodes, count, encodings, take):
        assert re.search(r"bucket \d+ of 20 \(w\d+|the size of the first message", error), error
