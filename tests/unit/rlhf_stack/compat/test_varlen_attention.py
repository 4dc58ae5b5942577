"""What a run reports of the attention that takes flash_attn's place."""

import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import pytest
from rlhf_stack.compat import attention_provider, varlen_attention
from rlhf_stack.config import env_vars

USED = "flash_attn is not installed: flash_attention_2 is served by"


@pytest.mark.parametrize(
    ("accelerator", "how"),
    [("cpu", "exact attention on the CPU, one sequence at a time"), ("cuda", "torch's")],
)
def test_a_run_logs_once_what_serves_flash_attention(
    accelerator: str, how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every model of a process asks for its implementation: actor, reference, critic and reward."""
    names = ("AttentionInterface", "AttentionMaskInterface", "flash_attention_mask")
    for name in ("transformers", "transformers.masking_utils"):
        module = ModuleType(name)
        vars(module).update(dict.fromkeys(names, MagicMock()))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(varlen_attention, "find_spec", lambda _: None)
    monkeypatch.setenv(env_vars.ACCELERATOR, accelerator)
    monkeypatch.setattr(attention_provider, "_file", lambda *_: Path("varlen.py"))
    varlen_attention._register.cache_clear()
    found = [varlen_attention.implementation("flash_attention_2") for _ in range(4)]
    varlen_attention._register.cache_clear()
    assert found == [varlen_attention.NAME] * 4
    logged = capsys.readouterr()
    assert (logged.out + logged.err).count(f"{USED} {how}") == 1
