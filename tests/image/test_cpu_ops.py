"""vLLM 0.4.2's CPU operators, compiled by our recipe, compute what torch does.

On any x86-64-v3 machine: vLLM asks for AVX-512, and the recipe does without.
"""

from importlib.metadata import distributions

import pytest
import torch

RECIPE = "vllm-cpu-ops"
TOKENS, HEADS, HEAD_SIZE, BLOCK, BLOCKS = 21, 2, 64, 16, 4
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
DTYPES = list(CLOSE)


@pytest.fixture
def ops():
    """The operators, where the recipe made them."""
    if RECIPE not in {item.metadata["Name"] for item in distributions()}:
        pytest.skip("vLLM's operators of this cell come with its wheel")
    from vllm import _custom_ops

    torch.manual_seed(0)
    return _custom_ops


def near(found, expected):
    torch.testing.assert_close(
        found, expected.to(found.dtype), rtol=CLOSE[found.dtype], atol=CLOSE[found.dtype]
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
    """Half of the input through the function, times the other half."""
    given = torch.randn(TOKENS, 2 * HEAD_SIZE).to(dtype)
    found = torch.empty(TOKENS, HEAD_SIZE, dtype=dtype)
    getattr(ops, name)(found, given)
    gate, other = given.float().chunk(2, dim=-1)
    near(found, function(gate) * other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(ops, dtype):
    """By the root of the mean of squares."""
    given, weight = torch.randn(TOKENS, HEAD_SIZE).to(dtype), torch.rand(HEAD_SIZE).to(dtype)
    found = torch.empty_like(given)
    ops.rms_norm(found, given, weight, 1e-6)
    wide = given.float()
    near(found, wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_on_pages(ops, dtype):
    """Of one token to 21 before it, which lie in the pages of a cache."""
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
    near(found, torch.einsum("hqk,khd->qhd", weights, value.float()))
