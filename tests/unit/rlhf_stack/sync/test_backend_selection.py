"""Selection of a run's backend; syncs over gloo are in tests/cluster."""

import json
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from rlhf_stack import sync
from rlhf_stack.sync import backend_selection
from rlhf_stack.sync.backend_selection import RankDevice, nccl_obstacle

from tests.unit.fake_cuda import SECONDS


def describe(rank: int) -> str:
    return f"rank {rank}"


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ([RankDevice("a", ""), RankDevice("b", ""), RankDevice("c", "")], ""),
        ([RankDevice("a", ""), RankDevice(None, "")], "rank 1 has no GPU"),
        (
            [RankDevice("a", ""), RankDevice("b", "libnccl.so.2 not found")],
            "rank 1 cannot use NCCL: libnccl.so.2 not found",
        ),
        (
            [RankDevice("a", ""), RankDevice("b", ""), RankDevice("a", "")],
            "rank 0 and rank 2 share GPU a, which NCCL refuses",
        ),
    ],
)
def test_the_first_obstacle_to_nccl_is_the_reason(ranks: list[RankDevice], reason: str) -> None:
    assert nccl_obstacle(ranks, describe) == reason


@pytest.mark.parametrize(
    ("backend", "colocated", "asynchronous", "expected"),
    [
        ("auto", True, False, "nccl"),
        ("auto", True, True, "auto"),
        ("auto", False, False, "auto"),
        ("gloo", True, False, "gloo"),
        ("nccl", False, False, "nccl"),
    ],
)
def test_auto_on_shared_gpus_is_upstreams_cuda_ipc(
    backend: str, colocated: bool, asynchronous: bool, expected: str
) -> None:
    train = SimpleNamespace(colocate_all=colocated, async_enable=asynchronous)
    assert (
        sync.requested_backend(SimpleNamespace(vllm=SimpleNamespace(sync_backend=backend), train=train))
        == expected
    )


def test_a_trial_of_nccl_ends_also_if_a_rank_is_lost_before_its_result_is_exchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The communicator would wait for that rank until the process ends."""
    closed = threading.Event()
    group = MagicMock(rank=0)
    group.join.side_effect = lambda: closed.wait(SECONDS)
    group.close.side_effect = closed.set

    def exchange(topic: str, value: str, end: float) -> list[str]:
        if topic == "tried":
            raise sync.SyncError("ranks [1] of 2 did not join")
        return [value, json.dumps({"gpu": "b", "nccl_problem": ""})]

    members: Any = SimpleNamespace(
        exchange=exchange, rank=0, describe=describe, separate=lambda name: SimpleNamespace()
    )
    monkeypatch.setattr(backend_selection, "_own_device", lambda: RankDevice("a", ""))
    monkeypatch.setattr(backend_selection, "PROBE_SECONDS", 0.1)
    begun = time.monotonic()
    with pytest.raises(sync.SyncError, match="did not join"):
        backend_selection.select_group(members, lambda _: group)
    assert closed.wait(SECONDS)
    assert time.monotonic() - begun < SECONDS / 2
