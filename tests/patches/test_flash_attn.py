import importlib.util

import pytest

PROBE = """
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


def test_openrlhf_imports_without_flash_attn_and_names_it_when_it_is_needed(proves):
    if importlib.util.find_spec("flash_attn"):
        pytest.skip("flash_attn is installed here, where this patch changes nothing")
    proves(PROBE, "No module named 'flash_attn'")
