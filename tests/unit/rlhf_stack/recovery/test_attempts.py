"""rlhf_stack.recovery.attempts: when a run is submitted again, and without which nodes."""

from dataclasses import replace

import pytest
from rlhf_stack.recovery.attempts import Attempt, excluded_nodes, is_unplaced, why_not_again

KILLED = Attempt("job", "FAILED", 1, 60.0, resumed=0, saved=0, error="PeerError: rank 1 is dead")
PROGRESS = replace(KILLED, saved=4)


def test_a_run_that_failed_is_repeated_until_the_restarts_are_used() -> None:
    assert why_not_again([PROGRESS], 2) is None
    moving = [replace(PROGRESS, resumed=step, saved=step + 4) for step in (0, 4, 8)]
    assert why_not_again(moving[:2], 2) is None
    assert why_not_again(moving, 2) == "2 of 2 restarts are used"


def test_a_run_that_a_user_stopped_is_not_repeated() -> None:
    assert why_not_again([replace(PROGRESS, status="STOPPED")], 5) == "it was stopped by a user"


def test_a_rejected_command_line_is_not_repeated() -> None:
    assert why_not_again([replace(KILLED, code=2)], 5) == "its command line was rejected"


def test_a_confirmed_cause_is_not_repeated() -> None:
    reason = why_not_again([replace(PROGRESS, causes=("an old NCCL. Set X",))], 5)
    assert reason == "the cause is not transient: an old NCCL. Set X"


@pytest.mark.parametrize(
    "error",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        "ValueError: No available memory for the cache blocks.",
    ],
)
def test_memory_that_ran_out_is_repeated_only_after_progress(error: str) -> None:
    assert "ran out of memory" in str(why_not_again([replace(KILLED, error=error)], 5))
    assert why_not_again([replace(PROGRESS, error=error)], 5) is None


def test_the_same_error_without_progress_is_not_repeated_a_second_time() -> None:
    first = replace(KILLED, error="ValueError: token 11")
    again = replace(first, error="ValueError: token 7")
    assert why_not_again([first], 5) is None
    assert "failed twice with the same error" in str(why_not_again([first, again], 5))
    assert why_not_again([first, replace(again, saved=2)], 5) is None
    assert why_not_again([first, replace(again, error="OSError: full")], 5) is None


def test_only_an_error_of_two_attempts_without_progress_is_the_same_error_twice() -> None:
    """The progress of the attempt before the last one was not considered."""
    productive = replace(KILLED, saved=57, error="ValueError: token 11")
    stuck = replace(productive, resumed=57)
    assert why_not_again([productive, stuck], 5) is None
    assert "without progress after step 57" in str(why_not_again([productive, stuck, stuck], 5))
    for lost in ({"lost": ("10.0.0.2",)}, {"status": "HEAD LOST"}):
        assert why_not_again([replace(stuck, **lost), stuck], 5) is None


@pytest.mark.parametrize("error", ["PeerError: rank 1 is dead", "PlacementError: 1 of 2 GPUs are free"])
def test_errors_of_the_cluster_are_repeated_until_the_restarts_are_used(error: str) -> None:
    attempts = [replace(KILLED, error=error)] * 5
    assert why_not_again(attempts, 5) is None
    assert why_not_again([*attempts, attempts[0]], 5) == "5 of 5 restarts are used"


def test_only_a_run_without_room_is_unplaced() -> None:
    assert not is_unplaced(KILLED)
    assert is_unplaced(replace(KILLED, error="rlhf_stack.placement.model.PlacementError: cannot place this"))


def test_the_loss_of_a_node_or_the_head_is_repeated_whatever_the_error() -> None:
    lost = replace(KILLED, lost=("10.0.0.2",))
    assert why_not_again([lost, lost], 5) is None
    assert why_not_again([replace(KILLED, status="HEAD LOST")], 5) is None


def test_a_node_that_was_lost_twice_is_excluded() -> None:
    lost = [replace(KILLED, lost=nodes) for nodes in (("a", "b"), ("b",), ("c",))]
    assert excluded_nodes(lost) == ["b"]
