"""Which encoding a sync has."""

import pytest
from rlhf_stack.config import env_vars
from rlhf_stack.sync import SyncError
from rlhf_stack.sync.encoding import CHANGED, FULL, KEPT, Encodings, refuse_gloo_only

CONTENT = [("w", "bfloat16", (4,), 8)]
GB = 10**9
FAR = 1  # node that rank 0 sends to


def syncs(encodings: Encodings, *seconds: float | None, size: int = GB, left: int = 100 * GB) -> list[str]:
    """Return the encodings of syncs that take ``seconds``; None is one that fails."""
    found = []
    for each in seconds:
        found.append(encodings.select(CONTENT, size, left))
        if each is not None:
            encodings.ended(CONTENT, each, size)
    return found


def test_on_sends_all_weights_first_and_after_every_so_many_syncs() -> None:
    found = syncs(Encodings(0, "on", 3), *[0.1] * 7)
    assert found == [KEPT, CHANGED, CHANGED, KEPT, CHANGED, CHANGED, KEPT]
    assert syncs(Encodings(FAR, "on", 1), *[0.1] * 3) == [KEPT] * 3


def test_all_weights_are_sent_after_a_failed_sync() -> None:
    assert syncs(Encodings(FAR, "on", 9), 1, 1, None, None, 1, 1) == [
        KEPT,
        CHANGED,
        CHANGED,
        KEPT,
        KEPT,
        CHANGED,
    ]


def test_all_weights_are_sent_if_the_parameters_are_others() -> None:
    encodings = Encodings(FAR, "on", 9)
    syncs(encodings, 1, 1)
    assert encodings.select([*CONTENT, ("b", "bfloat16", (1,), 2)], GB, GB) == KEPT


def test_off_never_keeps_the_weights() -> None:
    assert syncs(Encodings(FAR, "off"), 9, 9, 9) == [FULL] * 3


def test_auto_sends_changes_over_a_slow_link_if_that_is_faster() -> None:
    assert syncs(Encodings(FAR, "auto", 4), 8, 8, 0.5, 0.5, 0.5, 8, 0.5) == [
        *(FULL, KEPT),
        *(CHANGED, CHANGED, CHANGED),
        *(KEPT, CHANGED),
    ]


@pytest.mark.parametrize(
    ("nodes", "seconds", "left"),
    [
        pytest.param(0, 8, 100 * GB, id="one node"),
        pytest.param(FAR, 0.9, 100 * GB, id="short"),
        pytest.param(FAR, 8, 2 * GB - 1, id="no memory"),
    ],
)
def test_auto_sends_all_weights_where_changes_do_not_pay(nodes: int, seconds: float, left: int) -> None:
    assert syncs(Encodings(nodes, "auto"), *[seconds] * 4, left=left) == [FULL] * 4


def test_the_memory_counts_that_is_left_when_the_weights_are_to_be_kept() -> None:
    """What the trainer has allocated since the group formed counts; what is kept already does not."""
    encodings = Encodings(FAR, "auto", 9)
    assert syncs(encodings, 8, 8, left=2 * GB - 1) == [FULL, FULL]
    assert syncs(encodings, 8, left=2 * GB) == [KEPT]
    assert syncs(encodings, 1, left=GB) == [CHANGED]


def test_auto_sends_all_weights_over_a_fast_link() -> None:
    assert syncs(Encodings(FAR, "auto"), *[5] * 4, size=6 * GB) == [FULL] * 4


def test_auto_returns_to_all_weights_where_changes_took_longer(capsys: pytest.CaptureFixture[str]) -> None:
    assert syncs(Encodings(FAR, "auto"), 2, 2, 3, 2, 2) == [FULL, KEPT, CHANGED, FULL, FULL]
    log = capsys.readouterr().out
    assert "keeps the weights, 1.00 GB of its host's memory" in log
    assert "all weights are sent again: that takes 2.00 s, and changed elements 3.00 s" in log


def test_what_cannot_be_honoured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.SYNC_SPARSE, "auto")
    refuse_gloo_only("this group is NCCL's")
    monkeypatch.setenv(env_vars.SYNC_SPARSE, "on")
    with pytest.raises(
        SyncError, match=r"RLHF_STACK_SYNC_SPARSE=on: .* and this group is NCCL's; use .*gloo"
    ):
        refuse_gloo_only("this group is NCCL's")
    monkeypatch.setenv(env_vars.SYNC_SPARSE, "auto")
    monkeypatch.setenv(env_vars.SYNC_SOURCES, "2")
    with pytest.raises(SyncError, match=r"RLHF_STACK_SYNC_SOURCES=2: several trainer ranks send .*NCCL's"):
        refuse_gloo_only("this group is NCCL's")


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "x", "1000001", "9" * 5000, "\uff19"])
def test_a_wrong_number_of_syncs_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.SYNC_FULL_EVERY, value)
    with pytest.raises(ValueError, match="RLHF_STACK_SYNC_FULL_EVERY="):
        env_vars.sync_full_every()
    monkeypatch.setenv(env_vars.SYNC_SPARSE, value)
    with pytest.raises(ValueError, match=r"RLHF_STACK_SYNC_SPARSE=.*expected auto or on or off"):
        env_vars.sync_sparse()
    monkeypatch.setenv(env_vars.SYNC_SHARDED, value)
    with pytest.raises(ValueError, match=r"RLHF_STACK_SYNC_SHARDED=.*expected auto or on or off"):
        env_vars.sync_sharded()
