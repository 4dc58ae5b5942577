import importlib.util

import pytest

SECTIONS = """
import openrlhf.models.ring_attn_utils as helpers

assert importlib.util.find_spec("flash_attn") is None, "others must see that flash_attn is absent"
try:
    helpers.unpad_and_slice_tensor(__import__("torch").ones(1, 2), None, None)
except RuntimeError as error:
    assert "flash_attn is not in this image" in str(error) and "--ds.packing_samples" in str(error), error
else:
    raise AssertionError("packing without flash_attn must not work unnoticed")
print("imported, and packing says what is missing")
"""

FLAT = """
from openrlhf.models.model import all_gather
from openrlhf.trainer.dpo_trainer import all_gather as same

assert importlib.util.find_spec("flash_attn") is None, "others must see that flash_attn is absent"
assert same is all_gather
try:
    all_gather(None, None)
except RuntimeError as error:
    assert "flash_attn is not in this image" in str(error), error
else:
    raise AssertionError("ring attention without flash_attn must not work unnoticed")
print("imported, and ring attention says what is missing")
"""


@pytest.mark.parametrize(
    "probe",
    [
        pytest.param(SECTIONS, marks=pytest.mark.carries("openrlhf==0.11.2"), id="0.11"),
        pytest.param(FLAT, marks=pytest.mark.carries("openrlhf==0.5.1"), id="0.5"),
    ],
)
def test_openrlhf_imports_without_flash_attn_and_names_it_when_it_is_needed(proves, probe):
    if importlib.util.find_spec("flash_attn"):
        pytest.skip("flash_attn is installed here, where this patch changes nothing")
    proves(probe, "No module named 'flash_attn'")
