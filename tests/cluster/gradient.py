"""Measures the gradient that a step of DeepSpeed applies, on each rank of a group over gloo.

gradient.py RANK WORLD PORT: prints JSON with the norm of the parameters' change by one step of plain SGD, by
"stage/accumulation", and at "0/0" that of one process with the whole batch and without DeepSpeed.
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
# As in the images' trainers: over gloo, ZeRO-3 gathers weights sequentially, by DeepSpeed's option or ours.
SEQUENTIAL = {"stage3_allgather_sequential": True}
if not SEQUENTIAL.keys() <= DeepSpeedZeroConfig.model_fields.keys():
    zero3_gather.serialize_allgather()
    SEQUENTIAL = {}


def model() -> nn.Module:
    """Return the network, the same on every rank and for every configuration."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 1)
    )


def batch() -> torch.Tensor:
    """Return all samples of one step; later samples are larger, so that the loss of any is noticed."""
    torch.manual_seed(1)
    return torch.randn(SAMPLES, WIDTH) * torch.arange(1, SAMPLES + 1)[:, None] / SAMPLES


def loss(network: nn.Module, samples: torch.Tensor) -> torch.Tensor:
    """Return a mean over the samples."""
    return (network(samples) ** 2).mean()


def applied(before: list[torch.Tensor], after: list[torch.Tensor]) -> float:
    """Return the norm of the change by the step, divided by the learning rate."""
    return float(torch.cat([(a - b).flatten() for a, b in zip(before, after, strict=True)]).norm()) / RATE


def alone() -> float:
    """Return the norm for one process with the whole batch and without DeepSpeed."""
    network = model()
    loss(network, batch()).backward()
    return float(torch.cat([p.grad.flatten() for p in network.parameters()]).norm())


def weights(engine: deepspeed.DeepSpeedEngine) -> list[torch.Tensor]:
    """Return the whole parameters, also if ZeRO partitions them."""
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=hasattr(parameters[0], "ds_id")):
        return [parameter.detach().clone() for parameter in parameters]


def step(stage: int, accumulation: int) -> float:
    """Train on this rank's share of the batch in ``accumulation`` micro batches; return the applied norm."""
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
