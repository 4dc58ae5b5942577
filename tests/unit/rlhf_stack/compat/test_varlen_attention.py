"""What a run reports of the attention that takes flash_attn's place."""

import sys
from types import ModuleType
from unittest.mock import MagicMock

import pytest
from rlhf_stack.compat import varlen_attention

USED = "flash_attn is not installed: torch's own attention (rlhf_stack_varlen) serves flash_attention_2"


def test_a_run_logs_once_that_torch_serves_flash_attention(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every model of a process asks for its implementation: actor, reference, critic and reward."""
    names = ("AttentionInterface", "AttentionMaskInterface", "flash_attention_mask")
    for name in ("transformers", "transformers.masking_utils"):
        module = ModuleType(name)
        vars(module).update(dict.fromkeys(names, MagicMock()))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(varlen_attention, "find_spec", lambda _: None)
    varlen_attention._register.cache_clear()
    found = [varlen_attention.implementation("flash_attention_2") for _ in range(4)]
    varlen_attention._register.cache_clear()
    assert found == [varlen_attention.NAME] * 4
    logged = capsys.readouterr()
    assert (logged.out + logged.err).count(USED) == 1
