"""OpenRLHF's default attention loads, and packed samples train, where flash_attn is not installed."""

import importlib.util

import pytest

PROBE = """
import torch
from rlhf_stack.demo import tiny_model

on_cpu()
from openrlhf.models import Actor, get_llm_for_sequence_regression

folder = Path("model")
tiny_model.make_model(folder, seed=0, layers=2, heads=4)
torch.manual_seed(0)
sequences = torch.randint(3, 20, (3, 8))
mask = torch.tensor([[1] * 8, [1] * 5 + [0] * 3, [0] * 2 + [1] * 6])
packed = Actor(str(folder), packing_samples=True).float()
padded = Actor(str(folder), attn_implementation="eager").float()
kept = mask[:, 1:] * mask[:, :-1]  # a token and the one before it, from which it is predicted
given = {"attention_mask": mask, "return_output": False, "action_mask": kept}
answers = [actor(sequences, **given) * kept for actor in (packed, padded)]
torch.testing.assert_close(*answers, rtol=0, atol=1e-5)
critic = get_llm_for_sequence_regression(str(folder), "critic", init_value_head=True, packing_samples=True)
assert critic.config._attn_implementation == packed.model.config._attn_implementation
family = next(base for base in type(packed.model).__mro__ if "_supports_flash_attn" in vars(base))
family._supports_flash_attn = False
for load in (lambda: Actor(str(folder)), lambda: get_llm_for_sequence_regression(str(folder), "critic")):
    try:
        load()
    except RuntimeError as refused:
        assert "does not support FlashAttention" in str(refused), refused
    else:
        raise AssertionError("a model whose attention FlashAttention does not compute was loaded")
family._supports_flash_attn, family._is_stateful = True, True
load()
try:
    Actor(str(folder), packing_samples=True)
except RuntimeError as refused:
    assert "passes a state from token to token" in str(refused), refused
else:
    raise AssertionError("packed samples of a model that passes a state between tokens")
print("packed samples have the log-probabilities of padded ones, and a critic loads; others are refused")
"""


@pytest.mark.patch("openrlhf/0.11.2/0010-serve-flash-attention")
def test_the_default_attention_loads_and_packed_samples_equal_padded_ones(proves):
    if importlib.util.find_spec("flash_attn"):
        pytest.skip("flash_attn is installed here, where this patch changes nothing")
    proves(PROBE, "FlashAttention2 has been toggled on, but it cannot be used")
