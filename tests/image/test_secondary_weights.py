"""ZeRO stage 3 with a second copy of the weights on each node (--zpg), of DeepSpeed 0.15.0."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.carries("deepspeed==0.15.0")

RANKS, SECONDS = 2, 240
SCRIPT = """
from contextlib import nullcontext

import deepspeed
import torch
from openrlhf.utils.deepspeed_utils import get_train_ds_config
from rlhf_stack.compat import deepspeed_ops
from rlhf_stack.compat.zero3_gather import serialize_allgather

deepspeed.init_distributed("gloo")
serialize_allgather()
rank, wide = torch.distributed.get_rank(), 256
config = get_train_ds_config(False, adam_offload=False, stage=3, zpg=2)
config |= {"train_micro_batch_size_per_gpu": 1, "train_batch_size": 2}


def engine(loading):
    with loading:
        model = torch.nn.Sequential(torch.nn.Linear(wide, wide), torch.nn.Linear(wide, wide))
    for parameter in model.parameters():
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
            if rank == 0:
                parameter.data.fill_(1 / wide)
        copy = getattr(parameter, "ds_secondary_tensor", None)
        assert copy is None or bool((copy == 1 / wide).all()), "the copy lacks the weights that were loaded"
    optimizer = deepspeed_ops.adam_class(False)(model.parameters(), lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def losses(of, number):
    found = []
    for _ in range(number):
        loss = of(torch.ones(1, wide, dtype=torch.bfloat16)).float().square().mean()
        of.backward(loss)
        of.step()
        found.append(loss.item())
    return found


first = engine(deepspeed.zero.Init(config_dict_or_path=config))
losses(first, 3)
first.save_checkpoint("checkpoint", tag="step3")
undisturbed = losses(first, 2)
continued = engine(nullcontext())
continued.load_checkpoint("checkpoint", tag="step3")
assert losses(continued, 2) == undisturbed, "a continued run computes with the initial weights"
"""


def test_the_copy_has_the_weights_that_were_loaded_and_continued(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={RANKS}", "rank.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RLHF_STACK_ACCELERATOR": "cpu"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
