"""State of OpenRLHF's trainer that upstream writes to no checkpoint, kept among a checkpoint's client states.

These are the coefficient of an adaptive KL penalty and, with OpenRLHF 0.5, the position in the pretraining
data, whose order follows from the run's seed. A checkpoint without them leaves the initial values.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

KL_COEFFICIENT, PRETRAIN_BATCHES = "kl_coefficient", "pretrain_batches"


class CountedCycle(Iterator[Any]):
    """``batches`` without end, as by `itertools.cycle`, and how many of them were ``taken``."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = itertools.cycle(batches)
        self.taken = 0

    def __next__(self) -> Any:
        self.taken += 1
        return next(self._batches)


def save_trainer_state(
    client_states: dict[str, Any], kl_controller: Any, pretrain: Iterator[Any] | None = None
) -> None:
    """Add the trainer's state to ``client_states``. Every rank of the trainer has the same.

    A fixed ``kl_controller`` has none, so that its flag decides also in a continued run.
    """
    if _is_adaptive(kl_controller):
        client_states[KL_COEFFICIENT] = float(kl_controller.value)
    if isinstance(pretrain, CountedCycle):
        client_states[PRETRAIN_BATCHES] = pretrain.taken


def restore_trainer_state(
    client_states: dict[str, Any], kl_controller: Any, pretrain: Iterator[Any] | None = None
) -> None:
    """Continue from the ``client_states`` of a checkpoint; {} without one."""
    if _is_adaptive(kl_controller):
        kl_controller.value = client_states.get(KL_COEFFICIENT, kl_controller.value)
    if isinstance(pretrain, CountedCycle):
        for _ in range(client_states.get(PRETRAIN_BATCHES, 0)):
            next(pretrain)


def _is_adaptive(kl_controller: Any) -> bool:
    return hasattr(kl_controller, "target")
