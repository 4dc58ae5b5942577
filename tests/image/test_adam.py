"""torch's AdamW, which replaces DeepSpeed's if that is not compiled, computes equal parameters."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

STEPS = 50
ARGUMENTS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}


def trained(optimizer_class: Callable[..., Any], seed: int) -> list[Any]:
    """Return parameters with and without decay, after `STEPS` of gradients drawn from ``seed``."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((7, 5), (5,))]
    groups = [
        {"params": parameters[:1], "weight_decay": 0.1},
        {"params": parameters[1:], "weight_decay": 0.0},
    ]
    optimizer = optimizer_class(groups, **ARGUMENTS)
    for _ in range(STEPS):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("offload", [False, True], ids=["fused_adam", "cpu_adam"])
def test_torch_s_adamw_equals_deepspeed_s(
    offload: bool, cell: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both agree within single-precision rounding over many steps, with and without weight decay."""
    import torch
    from rlhf_stack.compat import deepspeed_ops

    if cell["accelerator"]["kind"] != "cpu":
        pytest.skip("DeepSpeed's operator needs a GPU in this image")
    of_deepspeed = trained(deepspeed_ops.adam_class(offload), seed=0)
    monkeypatch.setattr(deepspeed_ops, "load_adam_operator", lambda _: False)
    substitute = deepspeed_ops.adam_class(offload)
    assert isinstance(substitute, functools.partial)
    of_torch = trained(substitute, seed=0)
    torch.testing.assert_close(of_torch, of_deepspeed, rtol=1e-5, atol=1e-6)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(of_torch, trained(substitute, seed=1), rtol=1e-5, atol=1e-6)
