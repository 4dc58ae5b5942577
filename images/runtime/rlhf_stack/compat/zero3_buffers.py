"""Buffers that DeepSpeed's ZeRO-3 would round while it creates a model of transformers 5."""

from collections.abc import Callable
from functools import wraps
from typing import Any

DONE = "_rlhf_stack_keeps_buffers"


def keep_buffers_precise(stage: int) -> None:
    """At ZeRO ``stage`` 3, keep the precision of two kinds of buffers in models that this process loads.

    ``zero.Init`` of DeepSpeed 0.19 rounds each new tensor to the type of the weights. transformers 5 computes
    rotary frequencies from a ``torch.arange`` of floats, which 4 took from integers. Buffers that a
    checkpoint has, such as the biases by which a router selects experts, are rounded before they are loaded.
    """
    if stage != 3:
        return
    from deepspeed.runtime.zero import partition_parameters as zero
    from transformers import modeling_utils

    if getattr(zero.Init, DONE, False):
        return
    zero.Init._add_tensor_creation_wrappers = _without_arange(zero)
    modeling_utils._load_state_dict_into_zero3_model = _into_float32(
        modeling_utils._load_state_dict_into_zero3_model
    )
    setattr(zero.Init, DONE, True)


def _without_arange(zero: Any) -> Callable[[Any], None]:
    import torch

    wrap = zero.Init._add_tensor_creation_wrappers

    @wraps(wrap)
    def wrapped(init: Any) -> None:
        wrap(init)
        to_device = zero.DeepSpeedTensorOverride.device in init.tensor_overrides
        torch.arange = zero.zero_wrapper_for_fp_tensor_constructor(
            zero._orig_torch_arange,
            target_fp_dtype=None,
            target_device=init.local_device if to_device else None,
        )

    return wrapped


def _into_float32(load: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(load)
    def loaded(model: Any, *arguments: Any, **options: Any) -> Any:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                    buffer.data = buffer.data.float()
        return load(model, *arguments, **options)

    return loaded
