"""Trainer ranks and engine workers that share GPUs, and the failures that they report to each other."""

import socket

import pytest
from rlhf_stack.sync import SyncError
from rlhf_stack.sync.same_gpu import MESSAGE_BYTES, REMEDY, Link, mismatch

TRAINERS = [("a", "trainer rank 0 on one"), ("b", "trainer rank 1 on two")]
WORKERS = [("a", "rank 0 of engine 0 on one"), ("b", "rank 0 of engine 1 on two")]


@pytest.mark.parametrize("workers", [WORKERS, WORKERS[::-1], WORKERS[1:], []])
def test_a_trainer_rank_has_one_worker_or_none(workers: list[tuple[str, str]]) -> None:
    """One without a worker: its engine was lost."""
    assert mismatch(TRAINERS, workers) == ""


@pytest.mark.parametrize(
    ("trainers", "workers", "reason"),
    [
        (
            TRAINERS[:1],
            WORKERS,
            "no trainer rank is on GPU b of rank 0 of engine 1 on two, but trainer rank 0 on one on GPU a",
        ),
        (
            TRAINERS,
            [WORKERS[0], ("a", "rank 1 of engine 0 on one")],
            "rank 0 of engine 0 on one and rank 1 of engine 0 on one have the same GPU, a",
        ),
        (
            [*TRAINERS, ("b", "trainer rank 2 on two")],
            WORKERS,
            "trainer rank 1 on two and trainer rank 2 on two have the same GPU, b",
        ),
    ],
)
def test_a_mismatch_names_ranks_gpus_and_nodes(
    trainers: list[tuple[str, str]], workers: list[tuple[str, str]], reason: str
) -> None:
    assert mismatch(trainers, workers) == f"weight sync: {reason}; {REMEDY}"


@pytest.mark.parametrize("character", ["e", "é", "\U0001f600", "\udcff"])
def test_a_failure_with_a_long_text_is_reported_whatever_its_characters(character: str) -> None:
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with own, other:
        Link(own, "the engine worker").send_failure(ValueError(character * MESSAGE_BYTES))
        with pytest.raises(SyncError, match=r"the trainer rank failed: ValueError: .{8000}"):
            Link(other, "the trainer rank").receive("to pack a bucket")
