"""The powers of the betas in DeepSpeed's Adam on a CPU, after a checkpoint was loaded.

Its C++ optimiser multiplies them from step to step; if it starts at a later step, it calls ``pow``, whose
last digit can differ (``IncrementStep`` in csrc/includes/cpu_adam.h of DeepSpeed 0.19.6). So a run that was
continued from a checkpoint got other weights than the undisturbed run. The operators of a GPU have no such
state.
"""

import functools
from collections.abc import Callable
from typing import Any

from rlhf_stack.accelerator import devices


@functools.cache
def replay_steps(optimizer: Any) -> None:
    """Call DeepSpeed's ``optimizer`` on zeros for each step in its state; once per optimiser.

    ``optimizer`` is DeepSpeed's, or a wrapper of ZeRO with one. One without that C++ state is left as it is.
    In a step it was called for each group of parameters, of which ZeRO makes one tensor: from the second call
    on it used ``pow``, and the next step began from that.
    """
    adam = getattr(optimizer, "optimizer", optimizer)
    steps = max((int(state.get("step", 0)) for state in adam.state.values()), default=0)
    if steps and (update := _update(adam, adam.param_groups[0])):
        for step in range(1, steps + 1):
            for _ in adam.state:
                update(step)


def _update(adam: Any, group: dict[str, Any]) -> Callable[[int], None] | None:
    import torch

    rates = group["lr"], *group["betas"], group["eps"]
    decay, corrected = group["weight_decay"], group.get("bias_correction", True)
    zeros = [torch.zeros(1) for _ in range(4)]
    if hasattr(adam, "ds_opt_adam"):
        return lambda step: adam.ds_opt_adam.adam_update(adam.opt_id, step, *rates, decay, corrected, *zeros)
    if hasattr(adam, "multi_tensor_adam") and not devices.is_gpu():
        lists, overflow = [[tensor] for tensor in zeros], torch.zeros(1, dtype=torch.int)
        return lambda step: adam.multi_tensor_adam(
            1, overflow, lists, *rates, step, adam.adam_w_mode, int(corrected), decay
        )
    return None
