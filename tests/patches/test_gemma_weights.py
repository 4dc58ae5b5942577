"""Weights of Gemma (the first) that a weight sync loads into vLLM 0.4.2, bucket by bucket."""

import pytest

PROBE = """
on_cpu()
import torch
from transformers import GemmaConfig, GemmaForCausalLM
import vllm.model_executor.model_loader  # first: it and the models import each other
from vllm.distributed import parallel_state
from vllm.model_executor.models.gemma import GemmaForCausalLM as EngineModel

alone()
parallel_state.init_distributed_environment(1, 0, "env://", backend="gloo")
parallel_state.initialize_model_parallel(1, 1, "gloo")
config = GemmaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1,
    num_key_value_heads=1, head_dim=64,
)
engine, trained = EngineModel(config), GemmaForCausalLM(config)
engine.load_weights(trained.state_dict().items())
with torch.no_grad():
    for parameter in trained.parameters():
        parameter.normal_()
sent = {name: parameter.detach().clone() for name, parameter in trained.named_parameters()}
for name, tensor in sent.items():
    engine.load_weights([(name, tensor)])
changed = [name for name, parameter in trained.named_parameters() if not torch.equal(sent[name], parameter)]
assert not changed, f"the loader changed what it was given: {changed}"
held, layer = dict(engine.named_parameters()), "model.layers.0."
assert torch.equal(held["model.norm.weight"], sent["model.norm.weight"] + 1)
assert torch.equal(held[f"{layer}mlp.down_proj.weight"], sent[f"{layer}mlp.down_proj.weight"])

from rlhf_stack.engine.worker_extension import WorkerMixin
from rlhf_stack.sync import digest

worker = WorkerMixin()
worker.model_runner = stub("the worker's model", model=engine)
found = worker.weight_digests([(name, list(tensor.shape)) for name, tensor in sent.items()])
norms = {name for name in sent if name.endswith("norm.weight")}
assert set(found["rearranged"]) == norms, found["rearranged"]
regions = [digest.RegionDigest.from_dict(part) for part in found["digests"]]
for name in sent.keys() - norms:
    own = [part for part in regions if part.name == name]
    assert own and not digest.differences(name, sent[name], [[own]]), f"{name} is reported as different"
print("each parameter of Gemma can be loaded alone, and is left as it was")
"""


@pytest.mark.patch("vllm/0.4.2/0006-load-parts-of-gemma")
def test_each_parameter_of_gemma_can_be_loaded_alone(proves):
    proves(PROBE, "Some weights are not initialized from checkpoints")
