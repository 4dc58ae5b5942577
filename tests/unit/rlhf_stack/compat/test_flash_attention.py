"""The replacements of flash_attn's helpers where flash_attn is not installed."""

import importlib
import sys
from types import ModuleType

import pytest


def test_the_remedy_for_ring_attention_names_both_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--with flash-attn` packs one of the two that ring attention needs."""
    einops = ModuleType("einops")
    monkeypatch.setattr(einops, "rearrange", None, raising=False)
    monkeypatch.setitem(sys.modules, "einops", einops)
    monkeypatch.delitem(sys.modules, "rlhf_stack.compat.flash_attention", raising=False)
    replacements = importlib.import_module("rlhf_stack.compat.flash_attention")
    monkeypatch.delitem(sys.modules, "rlhf_stack.compat.flash_attention")
    with pytest.raises(RuntimeError, match=r"--with flash-attn` and add the package ring_flash_attn in an"):
        replacements.all_gather()
