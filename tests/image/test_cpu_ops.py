"""vLLM 0.4.2's CPU operators, compiled by our recipe, compute the same as torch.

On any x86-64-v3 machine: upstream's build requires AVX-512, our recipe does not.
"""

from importlib.metadata import distributions

import pytest
import torch

RECIPE = "vllm-cpu-ops"
TOKENS, HEADS, HEAD_SIZE, BLOCK, BLOCKS = 21, 2, 64, 16, 4
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE)


@pytest.fixture
def ops():
    """Return the operators, if the recipe built them."""
    if RECIPE not in {item.metadata["Name"] for item in distributions()}:
        pytest.skip("vLLM's operators of this cell come with its wheel")
    from vllm import _custom_ops

    torch.manual_seed(0)
    return _custom_ops


def assert_close(found, expected):
    torch.testing.assert_close(
        found, expected.to(found.dtype), rtol=TOLERANCE[found.dtype], atol=TOLERANCE[found.dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("silu_and_mul", torch.nn.functional.silu),
        ("gelu_and_mul", torch.nn.functional.gelu),
        ("gelu_tanh_and_mul", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    ],
)
def test_activations(ops, name, function, dtype):
    """The function of one half of the input, multiplied by the other half."""
    values = torch.randn(TOKENS, 2 * HEAD_SIZE).to(dtype)
    found = torch.empty(TOKENS, HEAD_SIZE, dtype=dtype)
    getattr(ops, name)(found, values)
    gate, other = values.float().chunk(2, dim=-1)
    assert_close(found, function(gate) * other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(ops, dtype):
    """The input divided by the root mean square, times a weight."""
    values, weight = torch.randn(TOKENS, HEAD_SIZE).to(dtype), torch.rand(HEAD_SIZE).to(dtype)
    found = torch.empty_like(values)
    ops.rms_norm(found, values, weight, 1e-6)
    wide = values.float()
    assert_close(found, wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_paged_attention(ops, dtype):
    """Attention of one token to 21 tokens in the pages of a cache."""
    key, value = (torch.randn(TOKENS, HEADS, HEAD_SIZE).to(dtype) for _ in range(2))
    query = torch.randn(1, HEADS, HEAD_SIZE).to(dtype)
    packed = 16 // dtype.itemsize
    keys = torch.zeros(BLOCKS, HEADS, HEAD_SIZE // packed, BLOCK, packed, dtype=dtype)
    values = torch.zeros(BLOCKS, HEADS, HEAD_SIZE, BLOCK, dtype=dtype)
    pages = torch.tensor([[2, 1]], dtype=torch.int32)
    positions = torch.arange(TOKENS)
    slots = pages[0].long()[positions // BLOCK] * BLOCK + positions % BLOCK
    ops.reshape_and_cache(key, value, keys, values, slots, "auto", 1.0)
    found = torch.empty_like(query)
    scale = HEAD_SIZE**-0.5
    lengths = torch.tensor([TOKENS], dtype=torch.int32)
    ops.paged_attention_v1(
        found, query, keys, values, HEADS, scale, pages, lengths, BLOCK, TOKENS, None, "auto", 1.0
    )
    weights = torch.softmax(torch.einsum("qhd,khd->hqk", query.float(), key.float()) * scale, dim=-1)
    assert_close(found, torch.einsum("hqk,khd->qhd", weights, value.float()))
