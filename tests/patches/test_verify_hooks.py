import pytest

WORKER = """
import torch
from rlhf_stack.sync.verify import verify_sync

wrap = load("openrlhf/trainer/ray/vllm_worker_wrap.py", "wrap")
import ray
replace(ray, get=lambda references, **_: references)


@stub("the engine's model")
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lower = torch.nn.Parameter(torch.ones(4, 3))

    def load_weights(self, weights):
        for name, tensor in weights:
            self.lower.data.copy_(tensor)


worker = wrap.WorkerWrap.__new__(wrap.WorkerWrap)
worker.model_runner = types.SimpleNamespace(model=Model())
engine = stub(
    "an engine, which calls its worker in this process",
    call_workers=types.SimpleNamespace(remote=lambda method, *given: [getattr(worker, method)(*given)]),
    where=types.SimpleNamespace(remote=lambda: [{"node": "node 1"}]),
)
module = torch.nn.Linear(3, 4, bias=False)
trainer = types.SimpleNamespace(
    actor=types.SimpleNamespace(model=types.SimpleNamespace(module=module)),
    strategy=types.SimpleNamespace(args=types.SimpleNamespace(zero_stage=2)),
    vllm_engines=[engine],
)


def reported():
    try:
        verify_sync(trainer, 0, True)
    except Exception as error:
        return str(error)
    return "equal"


found = reported()
assert "weight: engine 0, rank 0 on node 1: " in found, f"a wrong weight of an engine is reported as: {found}"
worker.model_runner.model.lower.data.copy_(module.weight.data)
assert reported() == "equal", reported()
print("the wrong weight is reported:", found.splitlines()[-1].strip())
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
def test_a_wrong_weight_of_an_engine_is_named(proves):
    proves(WORKER, "a wrong weight of an engine is reported as: .* has no attribute 'weight_digests'")


@pytest.mark.patch("openrlhf/0.5.1/0007-record-and-verify-syncs")
def test_a_sync_is_recorded(proves):
    proves(FLAT, r"syncs recorded: \[\]")
