"""An adapter that OpenRLHF 0.5.1 saves at ZeRO stage 3."""

import pytest

SAVED = """
from contextlib import contextmanager

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from rlhf_stack.demo import tiny_model
from transformers import AutoModelForCausalLM

on_cpu()
alone()
from openrlhf.utils import deepspeed as strategies

folder = Path("model")
tiny_model.make_model(folder, seed=0, layers=1, heads=4)
adapted = LoraConfig(r=2, target_modules="all-linear")
model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), adapted)
whole = {name: value.detach().clone() for name, value in model.named_parameters()}


@contextmanager
def gathered(parameters, enabled):  # as ZeRO-3: a parameter has its values in this context only
    for parameter in parameters:
        parameter.data = next(whole[name] for name, one in model.named_parameters() if one is parameter)
    yield
    for parameter in parameters:
        parameter.data = torch.empty(0)


replace(strategies.deepspeed.zero, GatheredParameters=gathered)
replace(strategies, _z3_params_to_fetch=lambda parameters: parameters)
strategy = strategies.DeepspeedStrategy.__new__(strategies.DeepspeedStrategy)
strategy.stage = 3
strategy._unwrap_model = lambda model: model
tokenizer = stub("a tokenizer", save_pretrained=lambda _: None)
strategy.save_model(model, tokenizer, "adapter")
try:
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), "adapter")
except RuntimeError as error:
    raise AssertionError(f"the adapter cannot be loaded: {'size mismatch' in str(error)}") from None
found = dict(loaded.named_parameters())
for name, value in whole.items():
    if "lora" in name:
        assert torch.equal(found[name], value), name
print("the adapter is loaded as it was trained")
"""


@pytest.mark.patch("openrlhf/0.5.1/0042-save-one-adapter-at-zero3")
def test_an_adapter_of_zero3_can_be_loaded(proves):
    proves(SAVED, "the adapter cannot be loaded: True")
