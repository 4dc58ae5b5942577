"""Fused weights of transformers 5 are sent as the parts that its own checkpoints have."""

from types import SimpleNamespace

import pytest
import torch
from reloaded import BASE, CONFIGURATIONS
from rlhf_stack.sync import SyncError, actor_trainer
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
    assert {each.name for each in sent} == saved.keys() - dict(model.named_buffers()).keys()
    for each in sent:
        value = each.value()
        assert each.spec(trainer(model)).shape == saved[each.name].shape
        assert torch.equal(value, saved[each.name])
        same_memory = value.untyped_storage().data_ptr() == each.parameter.untyped_storage().data_ptr()
        assert same_memory, "a part is not a copy"


@pytest.mark.parametrize("is_sharded", [False, True])
def test_experts_of_qwen3_vl_moe_are_sent_transposed_as_vllm_expects_them(is_sharded):
    """transformers itself saves them as they are, also those that it has transposed when it loaded them."""
    text = BASE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 32}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": BASE["hidden_size"]}
    config = transformers.Qwen3VLMoeConfig(
        text_config=text, vision_config=vision | {"deepstack_visual_indexes": [0]}
    )
    model = transformers.Qwen3VLMoeForConditionalGeneration(config)
    own = {name: each.data for name, each in model.named_parameters()}
    for parameter in (
        model.parameters() if is_sharded else ()
    ):  # as ZeRO-3 leaves them until they are gathered
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    sent = engine_parameters(trainer(model), list(model.named_parameters()))
    for name, parameter in model.named_parameters():
        parameter.data = own[name]
    assert {each.name for each in sent} == own.keys()
    for each in sent:
        expected = own[each.name].transpose(1, 2) if ".experts." in each.name else own[each.name]
        assert each.spec(trainer(model)).shape == expected.shape
        assert torch.equal(each.value(), expected)
    assert model.get_parameter("lm_head.weight") is model.lm_head.weight


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


@pytest.mark.parametrize(
    ("family", "refused"),
    [
        ("mixtral", r"MixtralForCausalLM, .* instead of model\.layers\.0\.mlp\.\S+, and 6 parameters"),
        ("qwen3_moe", r"experts\.0\.\S+ instead of model\.layers\.0\.mlp\.experts\.\S+, and 4 parameters"),
        ("qwen3", None),
    ],
)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_rays_collectives_are_refused_for_parameters_with_other_names(
    family, refused, is_sharded, monkeypatch
):
    """Before an engine is up: upstream's sync would fail at Mixtral's first expert."""
    waited = []
    monkeypatch.setattr(actor_trainer, "wait_for_engine_start", waited.append)
    one = trainer(tiny(family))
    for parameter in one.actor.model.module.parameters() if is_sharded else ():  # as ZeRO-3 leaves them
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    sections = {"vllm": SimpleNamespace(sync_backend="nccl", sync_with_ray=True)}
    sections["train"] = SimpleNamespace(colocate_all=False, async_enable=False)
    one.strategy.args, one.vllm_engines = SimpleNamespace(**sections), []
    formed = []
    form = actor_trainer.forms_weight_group(lambda _, backend: formed.append(backend))
    if refused is None:
        form(one, "nccl")
        assert (formed, waited) == (["nccl"], [[]])
        return
    with pytest.raises(SyncError, match=refused + r".*: leave out --vllm\.sync_with_ray"):
        form(one, "nccl")
    assert formed == waited == []
