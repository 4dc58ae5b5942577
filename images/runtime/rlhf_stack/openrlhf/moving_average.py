"""The moving average of a trained model's weights, computed in 32 bits.

OpenRLHF averages in the type of the weights, and bf16 with a factor of 0.992 rounds small changes away. At
ZeRO stage 3 DeepSpeed discards what is written into weights that were gathered without a modifying rank.
"""

from typing import Any

from rlhf_stack.lazy import torch

AVERAGES = "_rlhf_stack_averages"


def average_weights(model: Any, average: Any, beta: float) -> None:
    """Move ``average`` towards the trained weights of ``model``: ``beta`` of it is kept.

    From the first call on, which starts at the weights of ``average``, the exact average of this rank's
    weights is on the host in 32 bits; ``average`` has it rounded. Nothing is gathered: at ZeRO stage 3
    DeepSpeed splits the weights of both models over the same ranks, and ZeRO++ has a secondary copy of
    trained weights only.
    """
    trained, averaged = list(model.parameters()), list(average.parameters())
    if len(trained) != len(averaged):
        raise RuntimeError(
            f"enable_ema cannot average {len(trained)} weights in a model with {len(averaged)}: it does not "
            "support LoRA"
        )
    exact: dict[int, Any] = vars(average).setdefault(AVERAGES, {})
    for number, (source, target) in enumerate(zip(trained, averaged, strict=True)):
        if source.requires_grad:
            exact[number] = _averaged(exact.get(number), source, target, beta)


def _averaged(exact: Any, source: Any, target: Any, beta: float) -> Any:
    new, rounded = _on_this_rank(source), _on_this_rank(target)
    if new.shape != rounded.shape:
        raise RuntimeError(
            f"enable_ema cannot average a weight of the shape {tuple(new.shape)} on this rank in one of "
            f"{tuple(rounded.shape)}: the two models differ or are sharded differently"
        )
    if exact is None:
        exact = rounded.to("cpu").to(torch.float32, copy=True)
    exact.lerp_(new.to("cpu").float(), 1 - beta)  # .to("cpu", float32) would need GPU memory for 32 bits
    rounded.copy_(exact)
    if hasattr(target, "ds_tensor"):
        target.partition()  # discards a gathered copy, as of a small weight, which DeepSpeed may keep
    return exact


def _on_this_rank(parameter: Any) -> Any:
    """What this rank stores of ``parameter``: its shard at ZeRO stage 3, otherwise all."""
    return parameter.ds_tensor if hasattr(parameter, "ds_tensor") else parameter.data
