"""One gather of weights at a time, for a DeepSpeed that has no option for it (0.15.0).

ZeRO-3 starts a gather for each weight of a list and waits for the last. A stream of a GPU ends them in their
order; gloo has two threads, so that weights before the last may not have come when they are read.
"""

from typing import Any

from rlhf_stack.accelerator import devices


def in_turn() -> None:
    """Let ZeRO-3 of this process wait for each weight that it gathers; a GPU needs no such thing."""
    if devices.is_gpu():
        return
    from deepspeed.runtime.zero.partition_parameters import Init

    together = Init._allgather_params_coalesced

    def one_by_one(init: Any, parameters: list[Any], hierarchy: int = 0, quantize: bool = False) -> None:
        for parameter in parameters:
            together(init, [parameter], hierarchy, quantize)

    Init._allgather_params_coalesced = one_by_one
