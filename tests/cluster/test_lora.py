"""A trainer with LoRA adapters of PEFT: engines receive and are compared with the merged weights."""

import copy
import sys
from contextlib import nullcontext
from dataclasses import astuple
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import WORLD, Ranks
from reloaded import BASE, CONFIGURATIONS
from rlhf_stack.config import env_vars
from rlhf_stack.sync import SyncError
from rlhf_stack.sync.engine_parameters import engine_parameters, parameter_spec, values
from rlhf_stack.sync.receiving import receive
from rlhf_stack.sync.sending import send
from rlhf_stack.sync.verify import synced_parameters
from trained import SECTIONS

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


def adapted():
    """A tiny Llama with adapters."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "vocab_size": 300}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    return with_adapters(transformers.AutoModelForCausalLM.from_config(config))


def with_adapters(model):
    """The model in bfloat16 with adapters as OpenRLHF makes them, which training has changed."""
    model = model.to(torch.bfloat16)
    chosen = peft.LoraConfig(
        task_type=peft.TaskType.CAUSAL_LM, r=8, lora_alpha=16, target_modules="all-linear", bias="none"
    )
    model = peft.get_peft_model(model, chosen).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    return model


def merged(model):
    """What PEFT itself merges, by the names of the base model."""
    return dict(copy.deepcopy(model).merge_and_unload().named_parameters())


def trainer(model, group=None):
    arguments = SimpleNamespace(
        ds=SimpleNamespace(zero_stage=2, tensor_parallel_size=1), vllm=SimpleNamespace(sync_backend="gloo")
    )
    return SimpleNamespace(
        actor=SimpleNamespace(model=SimpleNamespace(module=model)),
        strategy=SimpleNamespace(args=arguments),
        vllm_engines=[],
        _model_update_group=group,
    )


def test_names_and_values_are_those_of_the_merged_model():
    model = adapted()
    expected = merged(model)
    found = {each.name: each.value() for each in synced_parameters(trainer(model))}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    base = dict(model.named_parameters())
    changed = [n for n in found if f"base_model.model.{n.removesuffix('.weight')}.base_layer.weight" in base]
    assert len(changed) == 14
    for name in changed:
        before = base[f"base_model.model.{name.removesuffix('.weight')}.base_layer.weight"]
        assert not torch.equal(found[name], before), "an adapter that was ignored"


@SECTIONS
def test_a_fused_parameter_is_merged_once_for_all_of_its_experts():
    """A merge for each of 128 experts held 128 copies of all of them."""
    name, options = CONFIGURATIONS["qwen3_moe"]
    plain = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**BASE | options))
    model = with_adapters(plain)
    sent = dict(enumerate(synced_parameters(trainer(model))))
    expected = {index: each.value() for index, each in sent.items()}
    merges = []
    for layer in {id(each.layer): each.layer for each in sent.values() if each.layer is not None}.values():
        own = layer.get_delta_weight
        layer.get_delta_weight = lambda adapter, own=own: merges.append(own) or own(adapter)
    found = values(sent)
    assert all(torch.equal(found[index], expected[index]) for index in sent)
    assert len(merges) == len(set(merges)) < len([each for each in sent.values() if each.layer is not None])


@SECTIONS
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_adapters_of_experts_are_merged_and_sent_as_the_checkpoint_has_them(family, tmp_path):
    """PEFT wraps the parameters of fused experts, one around the other."""
    safetensors = pytest.importorskip("safetensors.torch")
    name, options = CONFIGURATIONS[family]
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**BASE | options))
    model = with_adapters(plain)
    copy.deepcopy(model).merge_and_unload().save_pretrained(tmp_path)
    expected = safetensors.load_file(tmp_path / "model.safetensors")
    sent = synced_parameters(trainer(model))
    assert {each.name for each in sent} == expected.keys()
    assert all(torch.equal(each.value(), expected[each.name]) for each in sent)
    adapted_experts = [each for each in sent if ".experts." in each.name and each.layer is not None]
    assert {each.layer.parameter_name for each in adapted_experts} == {"gate_up_proj", "down_proj"}
    for each in adapted_experts:
        adapters = each.layer.lora_A["default"].weight, each.layer.lora_B["default"].weight
        assert {id(source) for source in each.sources[1:]} == {id(adapter) for adapter in adapters}


@pytest.mark.timeout(120)
def test_engines_receive_the_merged_weights_bit_for_bit(monkeypatch):
    model = adapted()
    expected = merged(model)
    deepspeed = ModuleType("deepspeed")
    deepspeed.zero = SimpleNamespace(GatheredParameters=lambda *_, **__: nullcontext())
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    monkeypatch.setenv(env_vars.SYNC_BUCKET, "0.02")  # MB: the embedding is split

    def exchange(rank, group):
        if rank == 0:
            dist.init_process_group(
                "gloo", store=dist.TCPStore("127.0.0.1", 0, 1, True), rank=0, world_size=1
            )
            for wait in ("wait_for_engine_results", "raise_engine_error"):  # either starts Ray by itself
                monkeypatch.setattr(f"rlhf_stack.sync.sending.{wait}", lambda *_: [])
            return send(trainer(model, group), list(model.named_parameters()))
        content = [astuple(parameter_spec(name, tensor)) for name, tensor in expected.items()]
        held = {}

        def load(views):
            held.update((name, view.clone()) for name, view in views)

        receive([group], content, env_vars.sync_bucket(), torch.device("cpu"), load, torch.bfloat16)
        return held.keys() == expected.keys() and all(torch.equal(held[n], expected[n]) for n in held)

    with Ranks(exchange) as ranks:
        found = ranks.answers(seconds=90)
    size = sum(tensor.nbytes for tensor in expected.values())
    assert found == {0: size} | dict.fromkeys(range(1, WORLD), True)


def test_zero3_gathers_the_adapters_of_a_weight_with_it():
    model = adapted()
    sources = [source for each in synced_parameters(trainer(model)) for source in each.sources]
    assert {id(source) for source in sources} == {id(each) for each in model.parameters()}
    assert len(sources) == len(list(model.parameters())), "each is gathered once"


@SECTIONS
def test_of_a_vision_language_model_only_the_weights_with_adapters_are_sent_merged(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    config = transformers.Qwen2VLConfig(
        text_config={**BASE, "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6]}},
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
    )
    torch.manual_seed(0)
    model = with_adapters(transformers.Qwen2VLForConditionalGeneration(config))
    copy.deepcopy(model).merge_and_unload().save_pretrained(tmp_path)
    expected = safetensors.load_file(tmp_path / "model.safetensors")
    one = trainer(model)
    one.actor.is_vlm = True
    sent = synced_parameters(one)
    assert all(torch.equal(each.value(), expected[each.name]) for each in sent)
    layers = {id(each) for each in model.modules() if hasattr(each, "get_delta_weight")}
    assert {id(each.layer) for each in sent if each.layer is not None} == layers
    assert all(each.layer is not None or each.name.endswith(".bias") for each in sent)


def test_a_frozen_weight_that_is_not_sent_is_refused():
    model = adapted()
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    with pytest.raises(SyncError, match="14 weights of layers with LoRA adapters are not sent"):
        engine_parameters(trainer(model), trained)


def test_a_model_without_adapters_keeps_its_names_and_memory():
    module = torch.nn.Linear(2, 3)
    found = engine_parameters(trainer(module), list(module.named_parameters()))
    assert [each.name for each in found] == ["weight", "bias"]
    assert found[0].value().data_ptr() == module.weight.data_ptr()
