"""Runs that need a package which the environment does not have."""

from types import SimpleNamespace
from typing import Any

import pytest
from rlhf_stack.errors import UserError
from rlhf_stack.openrlhf import requirements


def run(ring: int, flat: bool = False) -> Any:
    return SimpleNamespace(ring=ring, flat=flat)


def test_ring_attention_without_its_packages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenRLHF fails after every model is loaded."""
    requirements.refuse_missing_packages(run(ring=1))
    with pytest.raises(UserError, match=r"--ds.ring_attn_size 2 needs flash_attn and ring_flash_attn, not"):
        requirements.refuse_missing_packages(run(ring=2))
    with pytest.raises(UserError, match=r"^--ring_attn_size 4 needs"):
        requirements.refuse_missing_packages(run(ring=4, flat=True))
    monkeypatch.setattr(requirements, "find_spec", lambda _: object())
    requirements.refuse_missing_packages(run(ring=2))
