"""The attention that OpenRLHF 0.5.1 packs samples with, where flash_attn is not installed."""

import importlib.util

import pytest

PROBE = """
import torch
from rlhf_stack.demo import tiny_model

on_cpu()
from openrlhf.models import Actor

folder = Path("model")
tiny_model.make_model(folder, seed=0, layers=2, heads=4)
torch.manual_seed(0)
lengths = (8, 5, 3)
alone = [torch.randint(3, 20, (1, length)) for length in lengths]
flash = Actor(str(folder), use_flash_attention_2=True, bf16=False, packing_samples=True)
eager = Actor(str(folder), use_flash_attention_2=False, bf16=False)
assert flash.model.config._attn_implementation == "flash_attention_2"
mask = torch.cat([torch.full((1, length), index + 1) for index, length in enumerate(lengths)], dim=1)
sizes = {"packed_seq_lens": list(lengths)}
packed = flash(torch.cat(alone, dim=1), attention_mask=mask, return_output=True, **sizes)
expected = [eager(one, attention_mask=torch.ones_like(one), return_output=True)["logits"][0] for one in alone]
torch.testing.assert_close(packed["logits"][0], torch.cat(expected), rtol=0, atol=1e-4)
longest = max(lengths)
ids = torch.cat([torch.nn.functional.pad(one, (longest - one.shape[1], 0)) for one in alone])
mask = torch.stack([(torch.arange(longest) >= longest - length).long() for length in lengths])
flash.packing_samples = False
padded = flash(ids, attention_mask=mask, return_output=True)["logits"]
torch.testing.assert_close(padded[mask.bool()], torch.cat(expected), rtol=0, atol=1e-4)
for model, name in (
    ("chameleon", "unpad_input"), ("paligemma", "unpad_input"), ("qwen2_vl", "flash_attn_varlen_func")
):
    found = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    assert getattr(found, name) is getattr(importlib.import_module("rlhf_stack.hooks.transformers"), name)
print("packed and padded samples have the logits of each sequence alone")
"""

SOFTCAPPING = """
on_cpu()
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
model = Gemma2ForCausalLM._from_config(
    Gemma2Config(**sizes, **heads), attn_implementation="flash_attention_2"
)
tokens = torch.ones(1, 8, dtype=torch.long)
try:
    model(tokens, attention_mask=tokens, use_cache=False)
except NotImplementedError as error:
    assert "without flash_attn, does not compute softcap" in str(error), error
else:
    raise AssertionError("Gemma 2 was computed without the softcapping of its attention")
print("Gemma 2, whose attention has softcapping, is refused")
"""


@pytest.mark.patch("transformers/4.46.1/0001-serve-flash-attention")
def test_packed_and_padded_samples_equal_each_sequence_alone(proves):
    if importlib.util.find_spec("flash_attn"):
        pytest.skip("flash_attn is installed here, where this patch changes nothing")
    proves(PROBE, "FlashAttention2 has been toggled on, but it cannot be used")


@pytest.mark.patch("transformers/4.46.1/0002-keep-the-softcapping-of-gemma-2")
def test_softcapping_that_is_not_computed_is_refused(proves):
    if importlib.util.find_spec("flash_attn"):
        pytest.skip("flash_attn is installed here, where this patch changes nothing")
    proves(SOFTCAPPING, "computed without the softcapping")
