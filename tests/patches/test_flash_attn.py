import importlib.util

import pytest

SECTIONS = """
import torch
import openrlhf.models.ring_attn_utils as helpers

assert importlib.util.find_spec("flash_attn") is None, "other packages must find flash_attn absent"
mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
tokens, indices, *_ = helpers.unpad_input(torch.ones(2, 3, 1), mask)
assert helpers.pad_input(tokens, indices, 2, 3).flatten().tolist() == mask.flatten().tolist()
try:
    helpers.all_gather(None, None)
except RuntimeError as error:
    assert "not in this image" in str(error) and "--ds.ring_attn_size" in str(error), error
else:
    raise AssertionError("ring attention without flash_attn must be an error")
print("imported, samples are packed, and ring attention names what is missing")
"""

FLAT = """
from openrlhf.models.model import all_gather
from openrlhf.trainer.dpo_trainer import all_gather as same

assert importlib.util.find_spec("flash_attn") is None, "other packages must find flash_attn absent"
assert same is all_gather
try:
    all_gather(None, None)
except RuntimeError as error:
    assert "not in this image" in str(error), error
else:
    raise AssertionError("ring attention without flash_attn must be an error")
print("imported, and ring attention names what is missing")
"""


@pytest.mark.parametrize(
    "probe",
    [
        pytest.param(
            SECTIONS, marks=pytest.mark.patch("openrlhf/0.11.2/0002-make-flash-attn-optional"), id="0.11"
        ),
        pytest.param(FLAT, marks=pytest.mark.patch("openrlhf/0.5.1/0002-make-flash-attn-optional"), id="0.5"),
    ],
)
def test_openrlhf_imports_without_flash_attn_and_names_it_when_needed(proves, probe):
    if importlib.util.find_spec("flash_attn"):
        pytest.skip("flash_attn is installed here, where this patch changes nothing")
    proves(probe, "No module named 'flash_attn'")
