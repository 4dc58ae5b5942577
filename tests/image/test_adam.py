"""Adam: torch's, which replaces DeepSpeed's if that is not compiled, and one that was continued."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

STEPS = 50
ARGUMENTS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}
CONTINUED = f"""
import sys
import torch
from rlhf_stack.compat import adam_history, deepspeed_ops

path, first, last, groups, offload = sys.argv[1], *map(int, sys.argv[2:])
parameters = [torch.nn.Parameter(torch.zeros(4096)) for _ in range(groups)]
sections = [{{"params": [each]}} for each in parameters]
optimizer = deepspeed_ops.adam_class(bool(offload))(sections, **{ARGUMENTS})
if first:
    values, state = torch.load(path)
    for parameter, value in zip(parameters, values):
        parameter.data.copy_(value)
    optimizer.load_state_dict(state)
    adam_history.replay_steps(optimizer)
for step in range(first, last):
    for parameter in parameters:
        parameter.grad = torch.randn(4096, generator=torch.Generator().manual_seed(step))
    optimizer.step()
torch.save(([parameter.data for parameter in parameters], optimizer.state_dict()), path)
"""
OVERFLOWS = f"""
import os
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
import deepspeed
import torch
import torch.distributed as dist
from rlhf_stack.compat import deepspeed_ops

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
deepspeed_ops.MOST_ELEMENTS = 8
model = torch.nn.Linear(3, 3)
optimizer = deepspeed_ops.torch_adamw(model.parameters(), **{ARGUMENTS})
for group in optimizer.param_groups:
    group["fused"] = True
config = {{"train_batch_size": 1, "zero_optimization": {{"stage": 2}}, "bf16": {{"enabled": True}}}}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
engine.backward(engine(torch.ones(1, 3, dtype=torch.bfloat16)).sum())
engine.step()
"""


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
    assert substitute is deepspeed_ops.torch_adamw
    of_torch = trained(substitute, seed=0)
    torch.testing.assert_close(of_torch, of_deepspeed, rtol=1e-5, atol=1e-6)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(of_torch, trained(substitute, seed=1), rtol=1e-5, atol=1e-6)


def test_torch_s_adamw_accepts_parameters_that_a_gpu_does_not_have_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """OpenRLHF 0.5.1 creates the optimizer before DeepSpeed moves the model."""
    import torch
    from rlhf_stack.compat import deepspeed_ops

    monkeypatch.setattr(deepspeed_ops, "load_adam_operator", lambda _: False)
    monkeypatch.setattr("rlhf_stack.accelerator.devices.is_gpu", lambda: True)
    optimizer = deepspeed_ops.adam_class(offload=False)([torch.nn.Parameter(torch.zeros(4))], **ARGUMENTS)
    assert [group["fused"] for group in optimizer.param_groups] == [True]


@pytest.mark.carries("deepspeed==0.15.0")
def test_a_step_on_a_partition_that_torch_would_update_wrongly_is_refused(tmp_path: Path) -> None:
    """ZeRO-2 of DeepSpeed 0.15.0 has replaced the parameters by one flat tensor."""
    script = tmp_path / "starts.py"
    script.write_text(OVERFLOWS)
    done = subprocess.run(
        [sys.executable, str(script)], check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("train with --zero_stage 3 or on more GPUs")


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("offload", [False, True], ids=["fused_adam", "cpu_adam"])
def test_a_continued_optimizer_equals_the_undisturbed_one(
    offload: bool, groups: int, cell: dict[str, Any], tmp_path: Path
) -> None:
    """From a checkpoint, in a new process, the parameters of each group are equal bit for bit."""
    import torch

    if cell["accelerator"]["kind"] != "cpu":
        pytest.skip("DeepSpeed's operator needs a GPU in this image")

    def train(file: str, first: int, last: int) -> Any:
        path = tmp_path / file
        numbers = map(str, (first, last, groups, int(offload)))
        subprocess.run([sys.executable, "-c", CONTINUED, str(path), *numbers], check=True, timeout=300)
        return torch.stack(torch.load(path)[0])

    undisturbed = train("undisturbed", 0, 24)
    assert not torch.equal(train("continued", 0, 20), undisturbed)
    assert torch.equal(train("continued", 20, 24), undisturbed)
