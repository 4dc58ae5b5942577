"""Fused weights of transformers 5 are sent as the parts that its own checkpoints have."""

from types import SimpleNamespace

import pytest
import torch
from reloaded import BASE, CONFIGURATIONS
from rlhf_stack.sync import SyncError
from rlhf_stack.sync.checkpoint_layout import checkpoint_layout
from rlhf_stack.sync.engine_parameters import engine_parameters

transformers = pytest.importorskip("transformers", minversion="5.0")
safetensors = pytest.importorskip("safetensors.torch")


def tiny(family):
    name, options = CONFIGURATIONS[family]
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**BASE | options))


def trainer(model):
    sections = SimpleNamespace(ds=SimpleNamespace(zero_stage=2))
    return SimpleNamespace(
        actor=SimpleNamespace(model=SimpleNamespace(module=model)), strategy=SimpleNamespace(args=sections)
    )


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize("family", CONFIGURATIONS)
def test_what_is_sent_is_what_is_saved(family, is_loaded, tmp_path):
    model = tiny(family)
    model.save_pretrained(tmp_path)
    if is_loaded:
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    saved = safetensors.load_file(tmp_path / "model.safetensors")
    sent = engine_parameters(trainer(model), list(model.named_parameters()))
    assert {each.name for each in sent} == saved.keys()
    for each in sent:
        value = each.value()
        assert each.spec(trainer(model)).shape == saved[each.name].shape
        assert torch.equal(value, saved[each.name])
        same_memory = value.untyped_storage().data_ptr() == each.parameter.untyped_storage().data_ptr()
        assert same_memory, "a part is not a copy"


def test_a_tensor_that_joins_parameters_is_refused():
    """The refusal is named; transformers is told to write two weights as one."""
    loading = pytest.importorskip("transformers.core_model_loading")
    model = tiny("llama")
    split = loading.WeightConverter(
        ["mlp.up_gate.weight"],
        ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        operations=[loading.Chunk(dim=0)],
    )
    model._weight_conversions = [split]
    shapes = {name: (each.shape, each.dtype) for name, each in model.named_parameters()}
    with pytest.raises(SyncError, match=r"mlp\.up_gate\.weight of the checkpoint of LlamaForCausalLM"):
        checkpoint_layout(model, shapes)
