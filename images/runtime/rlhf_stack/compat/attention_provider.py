"""Which package computes FlashAttention for models in this environment; imports none of them."""

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rlhf_stack.config import env_vars

TORCH = ("torch", "nn/attention/varlen.py")
XFORMERS = ("xformers", "_C_flashattention*.so")


def provider() -> str:
    """The provider in words, such as "xformers 0.0.26.post1"; "" if models cannot use flash_attention_2."""
    if importlib.util.find_spec("flash_attn") is not None:
        return _named("flash_attn")
    if env_vars.accelerator() == "cpu":
        return "exact attention on the CPU, one sequence at a time"
    if _file(*TORCH) is not None:
        return "torch's variable-length attention"
    return _named("xformers") if compiled_file() else ""


def is_flash_attention_2_served() -> bool:
    """Whether `compat.flash_attention_2` serves the functions of flash_attn 2, which is not installed."""
    if importlib.util.find_spec("flash_attn") is not None:
        return False
    return env_vars.accelerator() == "cpu" or compiled_file() is not None


def is_flash_attention_2_served_to(module: str) -> bool:
    """The same for the importing ``module``: it is served to transformers' own code alone.

    Models with code of their own (trust_remote_code) would import flash_attn itself.
    """
    return module.partition(".")[0] == "transformers" and is_flash_attention_2_served()


def compiled_file() -> Path | None:
    """The file of xformers with FlashAttention 2 compiled; None if there is none."""
    return _file(*XFORMERS)


def _file(package: str, pattern: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    folder = Path(spec.origin).parent if spec and spec.origin else None
    return next(folder.glob(pattern), None) if folder else None


def _named(distribution: str) -> str:
    try:
        return f"{distribution} {version(distribution)}"
    except PackageNotFoundError:
        return distribution
