"""rlhf_stack.recovery.trainer_state: what the trainer adapts continues from a checkpoint."""

import json
from types import SimpleNamespace
from typing import Any

from rlhf_stack.recovery.trainer_state import CountedCycle, restore_trainer_state, save_trainer_state

INITIAL = 0.1


def adaptive(value: float = INITIAL) -> Any:
    """A controller as OpenRLHF's AdaptiveKLController."""
    return SimpleNamespace(value=value, target=6.0)


def test_an_adaptive_coefficient_continues() -> None:
    states: dict[str, Any] = {"global_step": 2}
    before, after = adaptive(0.1 + 1e-16), adaptive()
    save_trainer_state(states, before)
    restore_trainer_state(json.loads(json.dumps(states)), after)
    assert after.value == before.value != INITIAL
    assert states["global_step"] == 2


def test_a_fixed_coefficient_is_the_one_of_the_command() -> None:
    states: dict[str, Any] = {}
    fixed = SimpleNamespace(value=INITIAL)
    save_trainer_state(states, fixed)
    assert states == {}
    save_trainer_state(states, adaptive(9.0))
    restore_trainer_state(states, fixed)
    assert fixed.value == INITIAL


def test_the_pretraining_data_continue_after_the_last_batch_also_in_a_later_pass() -> None:
    batches = ["a", "b", "c"]
    for taken in range(5):
        undisturbed, continued = CountedCycle(batches), CountedCycle(batches)
        for _ in range(taken):
            next(undisturbed)
        states: dict[str, Any] = {}
        save_trainer_state(states, adaptive(), undisturbed)
        restore_trainer_state(states, adaptive(), continued)
        assert [next(continued) for _ in range(4)] == [next(undisturbed) for _ in range(4)]
        assert continued.taken == undisturbed.taken == taken + 4


def test_a_checkpoint_without_this_state_leaves_the_initial_one() -> None:
    """Such as one of an earlier build, or of `train_ppo`, whose data are not counted."""
    controller, data = adaptive(), CountedCycle("abc")
    restore_trainer_state({"consumed_samples": 8}, controller, data)
    assert (controller.value, next(data)) == (INITIAL, "a")
    states: dict[str, Any] = {}
    save_trainer_state(states, SimpleNamespace(value=INITIAL), iter("abc"))
    assert states == {}
