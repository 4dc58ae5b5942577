"""States of the optimizer that --ds.enable_sleep moves to the host, in a run that was resumed."""

import pytest

RESUMED = """
import torch
from deepspeed.runtime.zero import offload_states
from openrlhf.utils.deepspeed.deepspeed_utils import offload_deepspeed_states

COPIES = ["exp_avg_offload_buffer", "exp_avg_sq_offload_buffer"]
alone()
on_cpu()
weight = torch.nn.Parameter(torch.empty(8, device="meta"))  # "meta" stands for the GPU
optimizer = torch.optim.AdamW([weight])
host = {"step": torch.tensor(3.0), **{name: torch.ones(8) for name in ("exp_avg", "exp_avg_sq", *COPIES)}}
saved = optimizer.state_dict() | {"state": {0: host}}
optimizer.load_state_dict(saved)
state = optimizer.state[weight]
assert [state[name].device.type for name in COPIES] == ["meta"] * 2, "torch loads states to their parameter"
state |= {name: torch.full((8,), 2.0) for name in ("exp_avg", "exp_avg_sq")}  # "meta" has no values to copy



def offload(**_):
    assert not [name for name in COPIES if name in state], "states are offloaded to copies on the GPU"
    offload_states.offload_adam_states(optimizer, "cpu")


zero = stub("an optimizer of ZeRO-3", optimizer=optimizer, offload_states=offload)
model = stub(
    "an engine of DeepSpeed",
    optimizer=zero,
    config={"zero_optimization": {"offload_optimizer": {"device": "none"}}},
    zero_optimization_stage=lambda: 3,
    empty_partition_cache=lambda: None,
)
offload_deepspeed_states(model)
assert [state[name].device.type for name in COPIES] == ["cpu"] * 2
assert state["exp_avg"].tolist() == [2.0] * 8
print("states are offloaded to the host")
"""


@pytest.mark.patch("openrlhf/0.11.2/0061-offload-states-of-a-checkpoint")
def test_states_that_were_loaded_are_offloaded_to_the_host(proves):
    proves(RESUMED, "states are offloaded to copies on the GPU")
