"""Limits of the numbers and names in a run's arguments: one table for every release and command of OpenRLHF.

OpenRLHF's parser accepts any number; a wrong one fails after the models were loaded, or trains on nothing.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_stack.errors import UserError
from rlhf_stack.inputs.numbers import GPUS_PER_NODE, NODES, decimal
from rlhf_stack.inputs.text import shortened
from rlhf_stack.sync.backend import BACKENDS

MOST = 10**12  # of any number that has no limit of its own
SUM_TOLERANCE = 2**-26  # of numpy's Generator.choice, for probabilities


@dataclass(frozen=True)
class Range:
    """The numbers from ``least`` to ``most``: ``above`` excludes ``least``, and ``below`` ``most``.

    ``off`` is a further value, which turns the flag off.
    """

    least: float = 0
    most: float = MOST
    above: bool = False
    below: bool = False
    off: float | None = None

    def __contains__(self, value: float) -> bool:
        over = value > self.least if self.above else value >= self.least
        under = value < self.most if self.below else value <= self.most
        return (over and under) or value == self.off

    def __str__(self) -> str:
        if self.above or self.below:
            over = f"greater than {self.least:,}" if self.above else f"of at least {self.least:,}"
            return f"a number {over} and {'less than' if self.below else 'at most'} {self.most:,}"
        further = "" if self.off is None else f"{self.off}, or "
        return f"{further}a number from {self.least:,} to {self.most:,}"


NOT_NEGATIVE, SIGNED = Range(), Range(-MOST)
COUNT = Range(1, 10**7)
LENGTH = Range(1, 10**8)
FRACTION = Range(0, 1)
DECAY = Range(0, 1, below=True)
LEARNING_RATE = Range(0, 10)
STEPS = Range(1, 10**9, off=-1)
# The range of a number by the end of its flag, with sections (from 0.9 on) or without.
LIMITS: Mapping[str, Range] = {
    "zero_stage": Range(0, 3),
    "num_nodes": Range(1, NODES),
    "num_gpus_per_node": Range(1, GPUS_PER_NODE),
    "num_engines": Range(0, 10**6),
    "tensor_parallel_size": Range(1, GPUS_PER_NODE),
    "gpu_memory_utilization": Range(0, 1, above=True),
    "ring_attn_size": Range(1, GPUS_PER_NODE),
    "ring_attn_head_stride": COUNT,
    "ring_head_stride": COUNT,
    "zpg": Range(1, 10**6),
    "micro_batch_size": COUNT,
    "micro_train_batch_size": COUNT,
    "micro_rollout_batch_size": COUNT,
    "batch_size": COUNT,
    "train_batch_size": COUNT,
    "rollout_batch_size": COUNT,
    "max_tokens_per_gpu": Range(1, 10**9),
    "max_len": LENGTH,
    "max_new_tokens": LENGTH,
    "prompt_max_len": LENGTH,
    "generate_max_len": LENGTH,
    "n_samples_per_prompt": COUNT,
    "max_epochs": Range(1, 10**6),
    "num_episodes": Range(1, 10**6),
    "max_samples": Range(1),
    "lr": LEARNING_RATE,
    "learning_rate": LEARNING_RATE,
    "actor_learning_rate": LEARNING_RATE,
    "critic_learning_rate": LEARNING_RATE,
    "betas": DECAY,
    "momentum": DECAY,
    "ns_steps": COUNT,
    "max_norm": Range(0, 10**6),
    "lr_warmup_ratio": FRACTION,
    "min_lr_ratio": FRACTION,
    "seed": Range(0, 2**32 - 1),  # of numpy
    "gamma": FRACTION,
    "lambd": FRACTION,
    "top_p": Range(0, 1, above=True),
    "temperature": Range(0, 100, above=True),
    "eval.temperature": Range(0, 100),  # only engines have it, for which 0 is greedy
    "ema_beta": FRACTION,
    "beta": Range(0, above=True),
    "label_smoothing": FRACTION,
    "dropout": FRACTION,
    "lora.rank": Range(0, 65536),
    "lora_rank": Range(0, 65536),
    "async_queue_size": COUNT,
    "horizon": COUNT,
    "dual_clip": Range(1, above=True),
    "overlong_buffer_len": Range(0, 10**8, above=True),
    "stop_properly_penalty_coef": Range(-MOST, 1),
    "entropy_coef": SIGNED,
    "clip_range": SIGNED,  # of rewards, as the next
    "dynamic_filtering_range": SIGNED,
    "eval.steps": STEPS,
    "eval_steps": STEPS,
    "save_steps": STEPS,
    "freezing_steps": Range(-1),
    "freezing_actor_steps": Range(-1),
    "local_rank": Range(-1),
    "logging_steps": Range(1, 10**9),
    "max_num": COUNT,
    "max_ckpt_num": COUNT,
    "max_mem": Range(0, math.inf),  # upstream's default
}
REWARDS = (  # one of each is required; a parser without the first has another way
    ("reward.remote_url", "reward.model_name_or_path", "train.agent_func_path"),
    ("remote_rm_url", "reward_pretrain"),
)
ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
KERNEL = re.compile(r"[\w.-]+/[\w.-]+(@[\w.-]+)?(:\w+)?", re.ASCII)  # of a hub, for transformers' `kernels`
CHOICES: Mapping[str, Sequence[str | None]] = {
    "sync_backend": BACKENDS,
    "grad_accum_dtype": (None, "bf16", "fp16", "fp32"),
    "lr_scheduler": (  # of transformers 4.46 to 5
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
        "reduce_lr_on_plateau",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "warmup_stable_decay",
        "greedy",
    ),
}
PROBABILITIES = "_probs"  # the end of a flag with the probability of each dataset, by commas
DIGITS = r"\d(?:_?\d)*"  # of any script, as `float` reads them
NUMBER = re.compile(rf"[+-]?(?:{DIGITS}(?:\.(?:{DIGITS})?)?|\.{DIGITS})(?:[eE][+-]?{DIGITS})?")


def check_words(words: Sequence[str]) -> None:
    """Raise `UserError` for ``--flag=--``, of which argparse makes an empty list."""
    for word in words:
        if word.startswith("--") and word.endswith("=--"):
            raise UserError(f"{shortened(word, 60)}: expected a value")


def check_digits(words: Sequence[str], values: Any) -> None:
    """Raise `UserError` for a number in digits or a form that only Python reads, such as 1_000.

    ``values`` are the parsed arguments: what they have as text is no number, such as the name 20261127_1030.
    """
    parsed = [
        each for _, value in flags_of(values) for each in (value if isinstance(value, list) else [value])
    ]
    texts = {each for each in parsed if isinstance(each, str)}
    for word in words:
        value = word.partition("=")[2] if word.startswith("--") else word
        is_unusual = NUMBER.fullmatch(value.strip()) and (not value.strip().isascii() or "_" in value)
        if is_unusual and value not in texts:
            raise UserError(f"{shortened(value, 60)!r}: expected a number in the digits 0 to 9")


def check_values(values: Any, flat: bool) -> None:
    """Raise `UserError` with the flag, its value and its range if a value of the parsed arguments is invalid.

    ``flat``: the flags have no sections. Also if the run has no reward.
    """
    flags = dict(flags_of(values))
    for names in REWARDS:
        if names[0] in flags and not any(flags.get(name) for name in names):
            raise UserError(f"the run has no reward: give one of --{', --'.join(names)}")
    for name, value in flags.items():
        each = value if isinstance(value, list | tuple) else [value]
        shown = f"--{name} {shortened(' '.join(map(str, each)), 60)}"
        last = name.rpartition(".")[2]
        if last.endswith("attn_implementation"):
            if value not in ATTENTION and not KERNEL.fullmatch(str(value)):
                raise UserError(f"{shown}: expected one of {', '.join(ATTENTION)}, or a kernel OWNER/NAME")
        elif (choices := CHOICES.get(_known(CHOICES, name, flat))) and value not in choices:
            raise UserError(f"{shown}: expected one of {', '.join(filter(None, choices))}")
        elif last.endswith(PROBABILITIES) and value is not None:
            _check_probabilities(shown, str(value), _datasets(flags, name), flat)
        limits = LIMITS.get(_known(LIMITS, name, flat), NOT_NEGATIVE)
        if not all(number in limits for number in filter(_is_number, each)):
            raise UserError(f"{shown}: expected {limits}")


def _datasets(flags: Mapping[str, Any], name: str) -> int | None:
    """The number of datasets to which the probabilities of flag ``name`` belong, None without datasets."""
    start = name.removesuffix(PROBABILITIES)
    datasets = flags.get(start) or flags.get(f"{start}_dataset")
    return len(datasets.split(",")) if isinstance(datasets, str) else None


def _check_probabilities(shown: str, text: str, datasets: int | None, flat: bool) -> None:
    """Raise `UserError` unless ``text`` has a probability for each of ``datasets`` and their sum is 1.

    From OpenRLHF 0.9 on, which reads every dataset to its end, 0 would never end.
    """
    try:
        found = [decimal(part, 0, 1, above=not flat) for part in text.split(",")]
    except UserError as error:
        raise UserError(f"{shown}: {error}") from None
    if datasets is not None and len(found) != datasets:
        raise UserError(f"{shown}: expected as many numbers as datasets ({datasets}), separated by commas")
    if abs(math.fsum(found) - 1) > SUM_TOLERANCE:
        raise UserError(f"{shown}: expected numbers whose sum is 1, and it is {math.fsum(found):.10g}")


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
