"""Serialized all-gathers of ZeRO-3 on a CPU, for a DeepSpeed without an option for it (0.15.0).

ZeRO-3 starts an all-gather for each weight of a list and waits for the last. A GPU stream completes them in
order. gloo has two threads, so earlier weights may be incomplete when they are read.
"""

from typing import Any

from rlhf_stack.accelerator import devices


def serialize_allgather() -> None:
    """Make ZeRO-3 of this process wait for each weight that it gathers; does nothing on a GPU."""
    if devices.is_gpu():
        return
    from deepspeed.runtime.zero.partition_parameters import Init

    allgather = Init._allgather_params_coalesced

    def one_by_one(init: Any, parameters: list[Any], hierarchy: int = 0, quantize: bool = False) -> None:
        for parameter in parameters:
            allgather(init, [parameter], hierarchy, quantize)

    Init._allgather_params_coalesced = one_by_one
