"""Changed elements between real processes: exact sync after sync, and errors when a rank does not answer."""

import os
import re
import signal
import time

import pytest
import torch
from ranks import (
    FOUR_NODES,
    ONE_NODE,
    TWO_NODES,
    WORLD,
    Ranks,
    arrive,
    as_bits,
    described,
    errors_without,
    random_bytes,
    receive_all,
    send,
)
from rlhf_stack import sync
from rlhf_stack.config import env_vars
from rlhf_stack.sync import delta
from rlhf_stack.sync.buckets import total_bytes
from rlhf_stack.sync.encoding import CHANGED, FULL, KEPT
from rlhf_stack.sync.engine_parameters import parameter_spec

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
                    found.append(arrive(group, sent, encoding))
                trained(sent, step)
        return found

    with Ranks(exchange, nodes) as ranks:
        found = ranks.answers(seconds=200)
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
        found = ranks.answers()
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
        found = ranks.answers()
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
    for error in errors_without(victim, how, nodes, count=60, encodings=(KEPT, CHANGED)):
        assert re.search(r"bucket \d+ of 60 \(w\d+|the size of the first message", error), error


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
        found = ranks.answers()
    assert isinstance(found[2], IndexError)
    for rank in (0, 1, 3):
        assert f"{described(2, FOUR_NODES)}: IndexError: element 7 of 3" in str(found[rank])
