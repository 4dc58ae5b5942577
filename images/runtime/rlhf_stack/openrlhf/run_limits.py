"""Limits of the numbers and names in a run's arguments: one table for every release and command of OpenRLHF.

OpenRLHF's parser accepts any number; a wrong one fails after the models were loaded, or trains on nothing.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf_stack.errors import UserError
from rlhf_stack.inputs.numbers import GPUS_PER_NODE, NODES
from rlhf_stack.inputs.text import shortened
from rlhf_stack.sync.backend import BACKENDS

MOST = 10**12  # of any number that has no limit of its own
COUNT = (1, 10**7)
FRACTION = (0, 1)
# Least and most of a number by the end of its flag, with sections (from 0.9 on) or without.
LIMITS: Mapping[str, tuple[float, float]] = {
    "zero_stage": (0, 3),
    "num_nodes": (1, NODES),
    "num_gpus_per_node": (1, GPUS_PER_NODE),
    "num_engines": (0, 10**6),
    "tensor_parallel_size": (1, GPUS_PER_NODE),
    "ring_attn_size": (1, GPUS_PER_NODE),
    "ring_attn_head_stride": COUNT,
    "zpg": (1, 10**6),
    "micro_batch_size": COUNT,
    "micro_train_batch_size": COUNT,
    "micro_rollout_batch_size": COUNT,
    "batch_size": COUNT,
    "train_batch_size": COUNT,
    "rollout_batch_size": COUNT,
    "max_tokens_per_gpu": (1, 10**9),
    "max_len": (1, 10**8),
    "max_new_tokens": (1, 10**8),
    "prompt_max_len": (1, 10**8),
    "generate_max_len": (1, 10**8),
    "n_samples_per_prompt": COUNT,
    "max_epochs": (1, 10**6),
    "num_episodes": (1, 10**6),
    "max_samples": (1, 10**12),
    "lr": (0, 10),
    "learning_rate": (0, 10),
    "actor_learning_rate": (0, 10),
    "critic_learning_rate": (0, 10),
    "max_norm": (0, 10**6),
    "lr_warmup_ratio": FRACTION,
    "min_lr_ratio": FRACTION,
    "top_p": FRACTION,
    "temperature": (0, 100),
    "ema_beta": FRACTION,
    "dropout": FRACTION,
    "lora.rank": (0, 65536),
    "lora_rank": (0, 65536),
    "async_queue_size": COUNT,
}
UNLIMITED = ("max_mem",)  # infinity is upstream's default
ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
KERNEL = re.compile(r"[\w.-]+/[\w.-]+(@[\w.-]+)?(:\w+)?", re.ASCII)  # of a hub, for transformers' `kernels`
CHOICES: Mapping[str, Sequence[str | None]] = {
    "sync_backend": BACKENDS,
    "grad_accum_dtype": (None, "bf16", "fp16", "fp32"),
}
NUMBER = re.compile(r"[+-]?[\d_]+(?:\.[\d_]*)?(?:[eE][+-]?\d+)?")


def check_words(words: Sequence[str]) -> None:
    """Raise `UserError` for a number in digits or a form that only Python reads, such as 1_000."""
    for word in words:
        value = word.partition("=")[2] if word.startswith("--") else word
        if NUMBER.fullmatch(value) and (not value.isascii() or "_" in value):
            raise UserError(f"{shortened(value, 60)!r}: expected a number in the digits 0 to 9")


def check_values(values: Any, flat: bool) -> None:
    """Raise `UserError` with the flag, its value and its range if a value of the parsed arguments is invalid.

    ``flat``: the flags have no sections.
    """
    for name, value in flags_of(values):
        shown = f"--{name} {shortened(str(value), 60)}"
        last = name.rpartition(".")[2]
        if last.endswith("attn_implementation"):
            if value not in ATTENTION and not KERNEL.fullmatch(str(value)):
                raise UserError(f"{shown}: expected one of {', '.join(ATTENTION)}, or a kernel OWNER/NAME")
        elif (choices := CHOICES.get(_known(CHOICES, name, flat))) and value not in choices:
            raise UserError(f"{shown}: expected one of {', '.join(filter(None, choices))}")
        elif last.endswith("gpu_memory_utilization") and not (_is_number(value) and 0 < value <= 1):
            raise UserError(f"{shown}: expected a fraction greater than 0 and at most 1")
        elif isinstance(value, list | tuple) and not all(_within(one, -MOST, MOST) for one in value):
            raise UserError(f"{shown}: expected finite numbers")
        elif _is_number(value) and last not in UNLIMITED:
            least, most = LIMITS.get(_known(LIMITS, name, flat), (-MOST, MOST))
            if not _within(value, least, most):
                raise UserError(f"{shown}: expected a number from {_shown(least)} to {_shown(most)}")


def flags_of(values: Any, section: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name of each flag, with its sections, and its value."""
    for name, value in sorted(vars(values).items()):
        if hasattr(value, "__dict__") and not callable(value):
            yield from flags_of(value, f"{section}{name}.")
        else:
            yield f"{section}{name}", value


def _known(table: Mapping[str, Any], name: str, flat: bool) -> str:
    """The key of ``table`` at the end of a flag: whole names of a section, or the end of a flat name."""
    parts = name.split(".")
    ends = [".".join(parts[index:]) for index in range(len(parts))]
    found = next((end for end in ends if end in table), "")
    if found or not flat:
        return found
    return max((key for key in table if name.endswith(f"_{key}")), key=len, default="")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _within(value: Any, least: float, most: float) -> bool:
    return not _is_number(value) or (math.isfinite(value) and least <= value <= most)


def _shown(limit: float) -> str:
    return f"{limit:,}"
