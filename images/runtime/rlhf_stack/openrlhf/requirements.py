"""Packages and compiled operators that a run needs and that not every image has."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from rlhf_stack.compat import attention_provider
from rlhf_stack.compat.deepspeed_ops import CPU_ADAM, FUSED_ADAM, missing_for
from rlhf_stack.compat.varlen_attention import FLASH_ATTENTION
from rlhf_stack.config import image
from rlhf_stack.errors import UserError
from rlhf_stack.openrlhf.run_limits import KERNEL, flags_of

SWITCHES = {  # the end of a flag and the packages that it needs
    "load_in_4bit": ("bitsandbytes",),
    "use_liger_kernel": ("liger_kernel",),
    "sync_with_ray": ("cupy",),  # Ray's group over NCCL
    "use_ms": ("modelscope",),
    "wandb.key": ("wandb",),
    "use_wandb": ("wandb",),
    "tensorboard_dir": ("tensorboard",),
    "use_tensorboard": ("tensorboard",),
}
RING_ATTENTION = ("flash_attn", "ring_flash_attn")
FLASH_3 = ("flash_attn_interface",)
DEEP_GEMM = "deepgemm"
PACKED = ("packing_samples", "dynamic_batch_enable")  # the ends of switches with which samples are packed
VISION = ("torchvision",)  # vLLM imports it for each model with images that OpenRLHF trains


def refuse_missing_packages(values: Any) -> None:
    """Raise `UserError` if a feature of the parsed arguments needs a package that is not installed."""
    for flag, packages in _needed(values):
        if missing := [name for name in packages if find_spec(name) is None]:
            raise UserError(
                f"{flag} needs {' and '.join(missing)}, not installed here: leave the flag out, or add "
                f"{'it' if len(missing) == 1 else 'the packages'} to a derived image"
            )


def refuse_missing_operators(values: Any) -> None:
    """Raise `UserError` if the parsed arguments need an operator of DeepSpeed that is unavailable.

    The optimiser on the CPU does, and at ZeRO stage 3 that of a trainer that sleeps (``offload_states`` of
    deepspeed/runtime/zero/stage3.py).
    """
    flags = dict(flags_of(values))
    requested = [name for name, value in flags.items() if name.endswith("adam_offload") and value]
    sleeps = not requested and flags.get("ds.enable_sleep") and flags["ds.zero_stage"] == 3
    if sleeps and (missing := missing_for(FUSED_ADAM)):
        raise UserError(
            f"--ds.enable_sleep with --ds.zero_stage 3 needs DeepSpeed's {FUSED_ADAM}, which is not in this "
            f"image and cannot be compiled (no {', no '.join(missing)}): leave --ds.enable_sleep out, or "
            "give --ds.zero_stage 2"
        )
    if requested and (missing := missing_for(CPU_ADAM)):
        raise UserError(
            f"--{requested[0]} needs DeepSpeed's {CPU_ADAM}, which is not in this image and cannot be "
            f"compiled (no {', no '.join(missing)}): leave the flag out, or derive an image that has "
            f"{'it' if len(missing) == 1 else 'these tools'}"
        )


def refuse_missing_attention(values: Any) -> None:
    """Raise `UserError` if the parsed arguments need FlashAttention 2, and nothing in this image computes it.

    Outside of an image it is unknown what the image of the run has.
    """
    flags = dict(flags_of(values))
    chosen = [name for name, value in flags.items() if name == "flash_attn" and value]
    named = [name for name, value in flags.items() if value == FLASH_ATTENTION]
    if not (chosen or named) or not image.about().cell or attention_provider.provider():
        return
    chosen += [name for name, value in flags.items() if name.endswith(PACKED) and value]
    remedies = [f"leave out --{' and --'.join(chosen)}"] if chosen else []
    remedies += [f"give --{name} sdpa" for name in named]
    raise UserError(
        f"nothing here computes {FLASH_ATTENTION} for --{' and --'.join([*chosen, *named])}: this "
        "image has neither flash_attn, nor xformers' FlashAttention, nor torch's variable-length attention: "
        f"{', and '.join(remedies)}"
    )


def _needed(values: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The flags of ``values`` that need packages, and these."""
    for name, value in flags_of(values):
        flag = f"--{name} {value}" if not isinstance(value, bool) else f"--{name}"
        if name.endswith("ring_attn_size") and value > 1:
            yield flag, RING_ATTENTION
        elif name.endswith("attn_implementation") and value == "flash_attention_3":
            yield flag, FLASH_3
        elif name.endswith("max_images_per_prompt") and value > 0:
            yield flag, VISION
        elif _is_from_a_hub(name, value):
            yield flag, ("kernels",)
        elif value:
            found = next((SWITCHES[end] for end in SWITCHES if name == end or name.endswith(f".{end}")), ())
            yield f"--{name}", found


def _is_from_a_hub(name: str, value: Any) -> bool:
    """Whether a flag requests kernels that transformers loads from a hub."""
    if name.endswith("experts_implementation"):
        return bool(value == DEEP_GEMM)
    return name.endswith("attn_implementation") and KERNEL.fullmatch(str(value)) is not None
