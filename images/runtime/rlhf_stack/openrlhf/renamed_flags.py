"""Flags of published scripts that a later OpenRLHF replaced or dropped, with their successors."""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from rlhf_stack.inputs.text import suggestion

LEVEL, MODE = "--algo.advantage.is_correction_level", "--algo.advantage.is_correction_mode"
# OpenRLHF 0.11.2 describes its schemes by level and mode: "tis" was the default of 0.11.0.
SUCCESSORS: Mapping[str, str] = {
    "--algo.advantage.is_correction_enable": f"{LEVEL} token {MODE} clip",
    "--algo.advantage.is_correction_type tis": f"{LEVEL} token {MODE} clip",
    "--algo.advantage.is_correction_type icepop": f"{LEVEL} token {MODE} mask",
    "--algo.advantage.is_correction_type seq-mask-tis": f"{LEVEL} seq {MODE} mask",
}
# Flat flags whose nested successors have other words, or are several; a program has one or more of them.
FLAT: Mapping[str, Sequence[str]] = {
    "--pretrain": ("--actor.model_name_or_path", "--model.model_name_or_path"),
    "--ref_pretrain": ("--ref.model_name_or_path",),
    "--critic_pretrain": ("--critic.model_name_or_path",),
    "--reward_pretrain": ("--reward.model_name_or_path",),
    "--remote_rm_url": ("--reward.remote_url",),
    "--prompt_data": ("--data.prompt_dataset",),
    "--train_split": ("--data.dataset_split",),
    "--prompt_max_len": ("--data.max_len",),
    "--generate_max_len": ("--rollout.max_new_tokens",),
    "--save_path": ("--ckpt.output_dir",),
    "--load_checkpoint": ("--ckpt.load_enable",),
    "--colocate_all_models": ("--train.colocate_all",),
    "--gradient_checkpointing": (
        "--actor.gradient_checkpointing_enable",
        "--model.gradient_checkpointing_enable",
    ),
    "--gradient_checkpointing_use_reentrant": (
        "--actor.gradient_checkpointing_reentrant",
        "--model.gradient_checkpointing_reentrant",
    ),
    "--bf16": ("--ds.param_dtype bf16",),
    "--flash_attn": ("--ds.attn_implementation flash_attention_2",),
    "--learning_rate": ("--adam.lr",),
    "--actor_learning_rate": ("--actor.adam.lr",),
    "--critic_learning_rate": ("--critic.adam.lr",),
    "--l2": ("--actor.adam.weight_decay", "--critic.adam.weight_decay", "--adam.weight_decay"),
    "--freezing_actor_steps": ("--critic.freezing_steps",),
    "--use_kl_estimator_k3": ("--algo.kl.estimator k3",),
    "--ref_reward_offload": ("--ref.offload", "--reward.offload"),
    "--use_wandb": ("--logger.wandb.key",),
    "--use_tensorboard": ("--logger.tensorboard_dir",),
}
DROPPED = (  # of OpenRLHF 0.5
    "--actor_init_on_gpu",
    "--disable_trace_cache",
    "--perf",
    "--pretrain_data",
    "--pretrain_data_probs",
    "--pretrain_split",
    "--ptx_coef",
)
FLAG = re.compile(r"(?<!\S)--[\w.-]+")
SEPARATORS = re.compile("[._-]+")
DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"  # what editors make of --
MOST = 3  # options that are named for one flag


def hints(message: str, options: Collection[str]) -> list[str]:
    """What replaces each flag that ``message``, an error of the parser with ``options``, does not know."""
    replaced = hint(message)
    found = [replaced] if replaced else []
    found += [f"{word} begins with a dash that is not --" for word in message.split() if word[0] in DASHES]
    for flag in FLAG.findall(message.partition("unrecognized arguments: ")[2]):
        if flag in replaced.split():
            continue
        if flag in DROPPED:
            found.append(f"leave {flag} out, which has no successor")
        elif new := [option for option in FLAT.get(flag, ()) if option.split()[0] in options]:
            found.append(f"instead of {flag} use {' and '.join(new)}")
        elif named := _with_its_words(flag, options):
            found.append(f"instead of {flag} use {' or '.join(named)}")
        elif near := suggestion(flag, options):
            found.append(near.removeprefix("; "))
    return found


def hint(message: str) -> str:
    """The successors of the flags that ``message``, an error of the parser, names; "" if it names none.

    If a flag and its value were replaced, the same flag without a value is not mentioned.
    """
    words = f"{message.replace('=', ' ')} "
    found = [old for old in SUCCESSORS if f"{old} " in words]
    most_specific = next((old for old in found if " " in old), found[0] if found else "")
    return f"instead of {' and '.join(found)} use {SUCCESSORS[most_specific]}" if found else ""


def _with_its_words(flag: str, options: Collection[str]) -> list[str]:
    """The options that have all words of ``flag`` and the fewest others, as flat flags became nested."""
    others = {option: _words(option) - _words(flag) for option in options if _words(flag) <= _words(option)}
    fewest = min((extra.total() for extra in others.values()), default=0)
    found = sorted(option for option, extra in others.items() if extra.total() == fewest)
    return found if len(found) <= MOST else []


def _words(flag: str) -> Counter[str]:
    return Counter(SEPARATORS.split(flag.strip("-")))
