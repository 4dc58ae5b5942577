"""Buffers of a model that OpenRLHF 0.11.2 loads at ZeRO stage 3."""

import pytest

LOADED = """
import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig

on_cpu()
alone()
import deepspeed
from openrlhf.models import Actor
from openrlhf.utils.deepspeed import deepspeed_utils

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
deepspeed.init_distributed("gloo")
config = Glm4MoeConfig(
    vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=512, n_routed_experts=32,
    num_experts_per_tok=4, moe_intermediate_size=48, first_k_dense_replace=0, rope_theta=1e6,
)
torch.manual_seed(0)
saved = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
for module in saved.modules():
    if hasattr(module, "e_score_correction_bias"):
        module.e_score_correction_bias = 7.9 + 0.02 * torch.randn(32)
saved.save_pretrained("model")
plain = dict(AutoModelForCausalLM.from_pretrained("model", dtype=torch.bfloat16).named_buffers())
assert {"inv_freq", "e_score_correction_bias"} <= {name.rpartition(".")[2] for name in plain}

for given in (
    deepspeed_utils.get_train_ds_config(offload=False, stage=3, param_dtype="bf16"),
    deepspeed_utils.get_eval_ds_config(offload=False, stage=3, param_dtype="bf16"),
):
    given |= {"train_micro_batch_size_per_gpu": 1, "train_batch_size": 1}
    actor = Actor("model", attn_implementation="eager", ds_config=given)
    engine, *_ = deepspeed.initialize(model=actor.model, config=given)
    for name, buffer in engine.module.named_buffers():
        wrong = (buffer.float() - plain[name].float()).abs().max().item() if buffer.numel() else 0.0
        assert buffer.dtype == plain[name].dtype and not wrong, f"{name} was rounded, by up to {wrong:.1e}"
print("rotary frequencies and the biases of routers are those of the model")
"""


@pytest.mark.patch("openrlhf/0.11.2/0066-keep-buffers-precise-at-zero3")
def test_buffers_keep_their_precision_at_zero3(proves):
    proves(LOADED, "was rounded, by up to")
