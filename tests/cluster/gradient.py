"""The gradient that a step of DeepSpeed really applies, on each rank of a group over gloo.

gradient.py RANK WORLD PORT: prints JSON, by "stage/accumulation", the norm of what one step of plain SGD
takes off the parameters, and at "0/0" that of one process that has the whole batch and no DeepSpeed.
"""

import json
import os
import sys

RANK, WORLD, PORT = (int(argument) for argument in sys.argv[1:])
os.environ |= {
    "RANK": str(RANK),
    "LOCAL_RANK": "0",
    "WORLD_SIZE": str(WORLD),
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": str(PORT),
}

import deepspeed  # noqa: E402
import torch  # noqa: E402
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # noqa: E402
from rlhf_stack.compat import zero3_gather  # noqa: E402
from torch import nn  # noqa: E402

STAGES, ACCUMULATIONS = (0, 1, 2, 3), (1, 4)
SAMPLES, WIDTH, RATE = 16, 24, 1.0
# As the trainers of the images have it: over gloo, ZeRO-3 waits for each weight, by whichever way there is.
SEQUENTIAL = {"stage3_allgather_sequential": True}
if not SEQUENTIAL.keys() <= DeepSpeedZeroConfig.model_fields.keys():
    zero3_gather.in_turn()
    SEQUENTIAL = {}


def model() -> nn.Module:
    """The same on every rank and for every configuration."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 1)
    )


def batch() -> torch.Tensor:
    """All samples of one step; those that come later are larger, so that none can be lost unnoticed."""
    torch.manual_seed(1)
    return torch.randn(SAMPLES, WIDTH) * torch.arange(1, SAMPLES + 1)[:, None] / SAMPLES


def loss(network: nn.Module, samples: torch.Tensor) -> torch.Tensor:
    """A mean over the samples."""
    return (network(samples) ** 2).mean()


def applied(before: list[torch.Tensor], after: list[torch.Tensor]) -> float:
    """The norm of what the step took off."""
    return float(torch.cat([(a - b).flatten() for a, b in zip(before, after, strict=True)]).norm()) / RATE


def alone() -> float:
    """One process, the whole batch, no DeepSpeed."""
    network = model()
    loss(network, batch()).backward()
    return float(torch.cat([p.grad.flatten() for p in network.parameters()]).norm())


def weights(engine: deepspeed.DeepSpeedEngine) -> list[torch.Tensor]:
    """Whole parameters, also where ZeRO has cut them up."""
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=hasattr(parameters[0], "ds_id")):
        return [parameter.detach().clone() for parameter in parameters]


def step(stage: int, accumulation: int) -> float:
    """This rank's share of the batch, in as many micro batches."""
    network = model()
    micro = SAMPLES // WORLD // accumulation
    config = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, **SEQUENTIAL},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000,
    }
    optimizer = torch.optim.SGD(network.parameters(), lr=RATE)
    engine, *_ = deepspeed.initialize(model=network, optimizer=optimizer, config=config)
    before = weights(engine)
    for samples in batch().chunk(WORLD)[RANK].split(micro):
        engine.backward(loss(engine, samples))
        engine.step()
    found = applied(before, weights(engine))
    engine.destroy()
    return found


deepspeed.init_distributed(dist_backend="gloo", verbose=False)
norms = {"0/0": alone()}
for zero in STAGES:
    for times in ACCUMULATIONS:
        norms[f"{zero}/{times}"] = step(zero, times)
print(json.dumps(norms))
torch.distributed.barrier()  # gloo aborts a rank that is still in a collective when another has ended
torch.distributed.destroy_process_group()
