"""Runs that need a package which the environment does not have."""

from types import SimpleNamespace
from typing import Any

import pytest
from rlhf_stack.compat import attention_provider
from rlhf_stack.config import image
from rlhf_stack.errors import UserError
from rlhf_stack.openrlhf import requirements


def sections(**ds: Any) -> SimpleNamespace:
    defaults = {"ring_attn_size": 1, "attn_implementation": "sdpa", "load_in_4bit": False}
    return SimpleNamespace(ds=SimpleNamespace(**defaults | ds), use_ms=False)


@pytest.mark.parametrize(
    ("values", "error"),
    [
        (sections(ring_attn_size=2), r"--ds.ring_attn_size 2 needs flash_attn and ring_flash_attn, not"),
        (SimpleNamespace(ring_attn_size=4), r"^--ring_attn_size 4 needs"),
        (sections(load_in_4bit=True), "--ds.load_in_4bit needs bitsandbytes, not installed"),
        (sections(use_liger_kernel=True), "--ds.use_liger_kernel needs liger_kernel"),
        (sections(attn_implementation="flash_attention_3"), "flash_attention_3 needs flash_attn_interface"),
        (sections(attn_implementation="owner/kernel"), "owner/kernel needs kernels"),
        (
            sections(experts_implementation="deepgemm"),
            "--ds.experts_implementation deepgemm needs kernels, not",
        ),
        (sections(max_images_per_prompt=1), "max_images_per_prompt 1 needs torchvision, not installed here"),
    ],
)
def test_a_feature_without_its_packages_is_refused(
    values: Any, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenRLHF fails after every model is loaded."""
    monkeypatch.setattr(requirements, "find_spec", lambda _: None)
    requirements.refuse_missing_packages(sections(experts_implementation="grouped_mm"))
    with pytest.raises(UserError, match=error):
        requirements.refuse_missing_packages(values)
    monkeypatch.setattr(requirements, "find_spec", lambda _: object())
    requirements.refuse_missing_packages(values)


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        (sections(adam_offload=True), "--ds.adam_offload"),
        (SimpleNamespace(adam_offload=True), "--adam_offload"),
    ],
)
def test_an_optimiser_on_the_cpu_without_its_operator_is_refused(
    values: Any, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actor raised when it started, in images that cannot compile the operator."""
    monkeypatch.setattr(requirements, "missing_for", lambda name: ["nvcc"] * (name == "cpu_adam"))
    requirements.refuse_missing_operators(sections(adam_offload=False))
    with pytest.raises(
        UserError, match=rf"^{flag} needs DeepSpeed's cpu_adam, .*\(no nvcc\): leave the flag"
    ):
        requirements.refuse_missing_operators(values)
    monkeypatch.setattr(requirements, "missing_for", lambda _: [])
    requirements.refuse_missing_operators(values)


def test_a_sleeping_trainer_without_the_optimiser_that_deepspeed_moves_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At ZeRO stage 3 its actor ended when it started: Offloading is supported only for FusedAdam."""

    def asked(**ds: Any) -> SimpleNamespace:
        return sections(**{"enable_sleep": True, "zero_stage": 3, "adam_offload": False} | ds)

    monkeypatch.setattr(requirements, "missing_for", lambda name: ["hipcc"] * (name == "fused_adam"))
    for works in ({"enable_sleep": False}, {"zero_stage": 2}, {"adam_offload": True}):
        requirements.refuse_missing_operators(asked(**works))
    with pytest.raises(
        UserError, match=r"^--ds.enable_sleep with --ds.zero_stage 3 needs DeepSpeed's fused_adam, .*no hipcc"
    ):
        requirements.refuse_missing_operators(asked())
    monkeypatch.setattr(requirements, "missing_for", lambda _: [])
    requirements.refuse_missing_operators(asked())


def test_a_key_of_wandb_is_not_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "find_spec", lambda _: None)
    values = SimpleNamespace(logger=SimpleNamespace(wandb=SimpleNamespace(key="secret")))
    with pytest.raises(UserError, match=r"--logger.wandb.key needs wandb") as raised:
        requirements.refuse_missing_packages(values)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("values", "named", "remedy"),
    [
        (
            SimpleNamespace(flash_attn=True, packing_samples=False),
            "--flash_attn",
            "leave out --flash_attn",
        ),
        (
            SimpleNamespace(flash_attn=True, packing_samples=True),
            "--flash_attn and --packing_samples",
            "leave out --flash_attn and --packing_samples",
        ),
        (
            sections(attn_implementation="flash_attention_2"),
            "--ds.attn_implementation",
            "give --ds.attn_implementation sdpa",
        ),
        (
            sections(attn_implementation="flash_attention_2", packing_samples=True),
            "--ds.packing_samples and --ds.attn_implementation",
            "leave out --ds.packing_samples, and give --ds.attn_implementation sdpa",
        ),
    ],
)
def test_flash_attention_that_nothing_in_the_image_computes_is_refused(
    values: Any, named: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`plan` reported that the run fits, and its first model failed to load."""
    monkeypatch.setattr(attention_provider, "provider", lambda: "")
    requirements.refuse_missing_attention(values)  # on a host, whose packages say nothing about the image
    monkeypatch.setattr(image, "about", lambda *_: image.About("ray2.9.3-vllm0.4.2-rocm5.7"))
    requirements.refuse_missing_attention(SimpleNamespace(flash_attn=False, packing_samples=False))
    requirements.refuse_missing_attention(
        sections(attn_implementation="flash_attention_3", packing_samples=True)
    )
    with pytest.raises(UserError) as raised:
        requirements.refuse_missing_attention(values)
    assert str(raised.value).startswith(f"nothing here computes flash_attention_2 for {named}: ")
    assert str(raised.value).endswith(f"nor torch's variable-length attention: {remedy}")
    monkeypatch.setattr(attention_provider, "provider", lambda: "xformers 0.0.26")
    requirements.refuse_missing_attention(values)
