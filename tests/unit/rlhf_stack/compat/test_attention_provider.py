"""What computes FlashAttention in an environment, found without importing it."""

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from rlhf_stack.compat import attention_provider
from rlhf_stack.config import env_vars

XFORMERS = "xformers/_C_flashattention.so"
TORCH = "torch/nn/attention/varlen.py"
EXACT = "exact attention on the CPU, one sequence at a time"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the packages of the environment are found, and no other."""

    def find(name: str) -> ModuleSpec | None:
        origin = tmp_path / name / "__init__.py"
        return ModuleSpec(name, None, origin=str(origin)) if origin.parent.is_dir() else None

    monkeypatch.setattr(importlib.util, "find_spec", find)
    return tmp_path


@pytest.mark.parametrize(
    ("files", "accelerator", "provider", "served"),
    [
        ([], "cuda", "", False),
        (["xformers/__init__.py"], "cuda", "", False),
        ([XFORMERS], "cuda", "xformers", True),
        ([XFORMERS], "cpu", EXACT, True),
        ([], "cpu", EXACT, True),
        ([TORCH], "cpu", EXACT, True),
        ([TORCH], "cuda", "torch's variable-length attention", False),
        ([TORCH, "flash_attn/__init__.py"], "cuda", "flash_attn", False),
        ([XFORMERS, "flash_attn/__init__.py"], "cuda", "flash_attn", False),
    ],
)
def test_provider_is_found_by_its_files(
    installed: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: list[str],
    accelerator: str,
    provider: str,
    served: bool,
) -> None:
    monkeypatch.setenv(env_vars.ACCELERATOR, accelerator)
    for file in files:
        (installed / file).parent.mkdir(parents=True, exist_ok=True)
        (installed / file).touch()
    assert attention_provider.provider() == provider
    assert attention_provider.is_flash_attention_2_served() == served


@pytest.mark.parametrize(
    ("module", "served"),
    [
        ("transformers", True),
        ("transformers.models.llama", True),
        ("transformers_modules.own", False),
        ("", False),
    ],
)
def test_it_is_served_to_the_code_of_transformers_alone(
    installed: Path, monkeypatch: pytest.MonkeyPatch, module: str, served: bool
) -> None:
    monkeypatch.setenv(env_vars.ACCELERATOR, "cpu")
    assert attention_provider.is_flash_attention_2_served_to(module) == served
