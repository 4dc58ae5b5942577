"""Changed elements between real processes: exact sync after sync, and errors when a rank does not answer."""

import os
import re
import signal
import time
from dataclasses import astuple

import pytest
import torch
from rlhf_stack import sync
from rlhf_stack.config import env_vars
from rlhf_stack.sync import delta
from rlhf_stack.sync.buckets import plan_buckets, total_bytes
from rlhf_stack.sync.encoding import CHANGED, FULL, KEPT
from rlhf_stack.sync.engine_parameters import parameter_spec
from rlhf_stack.sync.receiving import receive
from rlhf_stack.sync.sending import new_sender
from test_buckets import (
    FOUR_NODES,
    ONE_NODE,
    TWO_NODES,
    WORLD,
    Ranks,
    as_bits,
    described,
    nothing,
    random_bytes,
)

LIMIT = 3 << 19
DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.bool]
STEPS = (FULL, KEPT, CHANGED, CHANGED, FULL, KEPT, CHANGED)


def weights(dtype, seed):
    """Return named tensors of any bits: empty, small, above `LARGE`, above a bucket, and parts of others."""
    generator = torch.Generator().manual_seed(seed)

    def of(size, *shape):
        return random_bytes(dtype, (size // dtype.itemsize, *shape), generator)

    tensors = [
        of(70, 3),
        of(0),
        of(1 << 20),
        of(9)[0] if dtype.itemsize < 8 else of(8)[0],
        of((4 << 20) + 24),
        of(3000, 7).t(),
        of(2000)[3:150],
        of(1 << 16, 3)[100:, 1:3],
    ]
    return [(f"w{index}", tensor) for index, tensor in enumerate(tensors)]


def send(group, parameters, encoding, in_place=True, before=nothing):
    """Send as the trainer does; return the bytes on a link."""
    specs = [parameter_spec(name, tensor) for name, tensor in parameters]
    with group.syncing():
        buckets = plan_buckets(specs, LIMIT)
        sender = new_sender(group, encoding, buckets, in_place)
        for number, bucket in enumerate(buckets):
            before(number)
            sender.send(number, bucket, [parameters[span.index][1] for span in bucket.spans])
        sender.finish()
    return sender.sent


def receive_all(group, parameters, encoding, before=nothing):
    """Receive as an engine worker does; return what arrived. Only the specs of ``parameters`` are used."""
    content = [astuple(parameter_spec(name, tensor)) for name, tensor in parameters]
    held = {}

    def load(views):
        before(views)
        held.update((name, view.clone()) for name, view in views)

    receive(group, content, LIMIT, torch.device("cpu"), load, parameters[0][1].dtype, encoding)
    return held


def trained(parameters, step):
    """Flip the last bit of the last element of each parameter, and some bits elsewhere, in place."""
    generator = torch.Generator().manual_seed(step)
    for _, tensor in parameters:
        if not tensor.numel() or tensor.dtype == torch.bool:
            continue
        content = as_bits(tensor).clone()
        content[-1] ^= 1
        chosen = torch.rand(len(content), generator=generator) < 0.002
        content[chosen] ^= 0x81
        tensor.copy_(content.view(tensor.dtype).reshape(tensor.shape))


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("nodes", "in_place"), [(ONE_NODE, True), (TWO_NODES, False), (FOUR_NODES, True)])
def test_every_dtype_and_layout_stays_exact_sync_after_sync(nodes, in_place):
    def exchange(rank, group):
        found = []
        for number, dtype in enumerate(DTYPES):
            sent = weights(dtype, seed=number)
            size = total_bytes(parameter_spec(*each) for each in sent)
            for step, encoding in enumerate(STEPS):
                if rank == 0:
                    taken = send(group, sent, encoding, in_place)
                    found.append(taken < 0.05 * size if encoding == CHANGED else taken >= size)
                else:
                    held = receive_all(group, sent, encoding)
                    same = [torch.equal(as_bits(held[n]), as_bits(t)) for n, t in sent]
                    found.append(len(held) == len(sent) and all(same))
                trained(sent, step)
        return found

    with Ranks(exchange, nodes) as ranks:
        found = ranks.answers(WORLD, 200)
    assert found == dict.fromkeys(range(WORLD), [True] * len(DTYPES) * len(STEPS))


@pytest.mark.timeout(60)
def test_a_node_keeps_the_weights_once_and_only_while_changes_are_sent():
    """The kernel's count of a node's shared memory, after each sync."""
    parameters = [(f"w{index}", torch.ones(1 << 20, dtype=torch.uint8)) for index in range(8)]

    def exchange(rank, group):
        kept = []
        for encoding in (FULL, KEPT, CHANGED, FULL):
            send(group, parameters, encoding) if rank == 0 else receive_all(group, parameters, encoding)
            group._members.exchange(f"ended {len(kept)}", "", time.monotonic() + 60)
            kept.append(os.fstat(group.kept._file).st_blocks * 512 >> 20)
            group._members.exchange(f"read {len(kept)}", "", time.monotonic() + 60)
        return kept

    with Ranks(exchange, TWO_NODES) as ranks:
        found = ranks.answers(WORLD)
    assert found == {rank: [0, 8, 8, 0] for rank in range(WORLD)}


@pytest.mark.timeout(60)
def test_changes_to_weights_that_a_rank_does_not_keep_are_refused(monkeypatch):
    """Rank 3 joined without the sync of all weights, as after a restart."""
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "12")
    parameters = weights(torch.bfloat16, 0)

    def exchange(rank, group):
        both = [KEPT, CHANGED]
        for encoding in both:
            send(group, parameters, encoding) if rank == 0 else receive_all(group, parameters, encoding)
            if rank == 3:
                group.kept.release()

    with Ranks(exchange, FOUR_NODES) as ranks:
        found = ranks.answers(WORLD)
    for rank in range(WORLD):
        assert isinstance(found[rank], sync.SyncError)
        assert f"{described(3, FOUR_NODES)} keeps no weights to which changes could be" in str(found[rank])


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("nodes", "victim", "how"),
    [
        (ONE_NODE, 1, signal.SIGKILL),
        (TWO_NODES, 0, signal.SIGKILL),
        (TWO_NODES, 2, signal.SIGSTOP),
        (TWO_NODES, 3, signal.SIGKILL),
        (FOUR_NODES, 2, signal.SIGKILL),
    ],
)
def test_every_other_rank_names_one_that_is_lost_while_changes_are_sent(monkeypatch, nodes, victim, how):
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "12")
    parameters = [(f"w{index}", torch.ones(1 << 20, dtype=torch.uint8)) for index in range(60)]

    def end():
        os.kill(os.getpid(), how)

    def exchange(rank, group):
        for encoding, lost in ((KEPT, None), (CHANGED, victim)):
            if rank == 0:
                send(group, parameters, encoding, before=lambda n, lost=lost: n == 20 and lost == 0 and end())
            else:
                receive_all(
                    group,
                    parameters,
                    encoding,
                    lambda views, lost=lost: rank == lost and views[0][0] == "w20" and end(),
                )

    with Ranks(exchange, nodes) as ranks:
        found = ranks.answers(WORLD - 1)
    assert set(found) == set(range(WORLD)) - {victim}
    for rank, error in found.items():
        assert isinstance(error, sync.SyncError)
        assert str(error).startswith(f"weight sync, {described(rank, nodes)}, gloo, ")
        assert f"{described(victim, nodes)} does not answer" in str(error)
        assert re.search(r"bucket \d+ of 60 \(w\d+|the size of the first message", str(error)), error


@pytest.mark.timeout(90)
def test_every_rank_reports_a_message_that_cannot_be_applied(monkeypatch):
    """A defect on rank 2, in the thread that receives."""
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "12")
    parameters = weights(torch.bfloat16, 0)

    def broken(*_):
        raise IndexError("element 7 of 3")

    def exchange(rank, group):
        if rank == 2:
            delta.apply = broken
        for encoding in (KEPT, CHANGED):
            send(group, parameters, encoding) if rank == 0 else receive_all(group, parameters, encoding)

    with Ranks(exchange, FOUR_NODES) as ranks:
        found = ranks.answers(WORLD)
    assert isinstance(found[2], IndexError)
    for rank in (0, 1, 3):
        assert f"{described(2, FOUR_NODES)}: IndexError: element 7 of 3" in str(found[rank])
