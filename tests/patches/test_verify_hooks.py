import pytest

WORKER = """
import torch

wrap = load("openrlhf/trainer/ray/vllm_worker_wrap.py", "wrap")


@stub("the engine's model")
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lower = torch.nn.Parameter(torch.ones(2, 3))

    def load_weights(self, weights):
        for name, tensor in weights:
            self.lower.data.copy_(tensor[2:])


worker = wrap.WorkerWrap.__new__(wrap.WorkerWrap)
worker.model_runner = types.SimpleNamespace(model=Model())
(digest,) = worker.weight_digests([("whole", [4, 3])])["digests"]
assert digest["name"] == "whole" and digest["bounds"] == [[2, 4], [0, 3]], digest
print("the worker says which half it holds")
"""

FLAT = """
import contextlib
import torch
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer
from rlhf_stack.sync.encoding import Encodings

alone()
group = stub(
    "the sync group",
    name="gloo",
    answers={},
    in_place=True,
    device=torch.device("cpu"),
    broadcast=lambda *_, **__: None,
    buffers=stub("its buffers", for_bucket=lambda size, _: torch.empty(size, dtype=torch.uint8)),
    start=lambda *_: stub("a transfer", finish=lambda: None),
    syncing=contextlib.nullcontext,
    kept=None,
    encodings=Encodings(0, "off"),
)
module = torch.nn.Linear(3, 2, bias=False, dtype=torch.bfloat16)
trainer = types.SimpleNamespace(
    actor=types.SimpleNamespace(model=types.SimpleNamespace(module=module)),
    strategy=types.SimpleNamespace(args=types.SimpleNamespace(zero_stage=2)),
    vllm_engines=[],
    _model_update_group=group,
)
import ray
replace(ray, get=lambda references, **_: references)
ActorPPOTrainer._broadcast_to_vllm(trainer)
syncs = recorded("sync")
assert len(syncs) == 1, f"syncs recorded: {syncs}"
assert syncs[0]["bytes"] == 12 and syncs[0]["parameters"] == 1 and syncs[0]["backend"] == "gloo", syncs
print("the sync is recorded:", syncs[0]["bytes"], "bytes")
"""


@pytest.mark.patch("openrlhf/0.5.1/0004-use-accelerator-worker-class")
def test_a_worker_reports_what_it_holds(proves):
    proves(WORKER, "has no attribute 'weight_digests'")


@pytest.mark.patch("openrlhf/0.5.1/0007-record-and-verify-syncs")
def test_a_sync_is_recorded(proves):
    proves(FLAT, r"syncs recorded: \[\]")
