"""The arguments of OpenRLHF's ``train_ppo_ray`` for the files of `rlhf_stack.demo.tiny_model`.

They differ between releases: `GENERATIONS` has an entry for each kind of command line in the cells.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from rlhf_stack.demo import digit_reward

PROMPTS_PER_STEP = 8
SAMPLES_PER_PROMPT = 8
BATCH = PROMPTS_PER_STEP * SAMPLES_PER_PROMPT
LENGTH = 64
RESPONSE = 16


@dataclass(frozen=True)
class Generation:
    """Releases of OpenRLHF, from ``since`` on, with the same command line.

    ``layouts`` are arguments for two nodes with two GPUs each. ``heads`` is the number of attention heads of
    the model, which vLLM limits. ``reward_model``: the reward comes from a model, not a function.
    """

    since: tuple[int, int]
    layouts: Mapping[str, Sequence[str]]
    arguments: Callable[[Path, int, int], list[str]]
    heads: int
    reward_model: bool


def installed(release: str | None = None) -> Generation:
    """The generation of ``release``, by default of the installed OpenRLHF."""
    found = release or version("openrlhf")
    major, minor = (int(part) for part in found.split(".")[:2])
    return next(one for one in GENERATIONS if one.since <= (major, minor))


def train_arguments(
    layout: str, directory: Path, steps: int, seed: int, release: str | None = None
) -> list[str]:
    """The arguments for ``steps`` optimiser steps on the files of `tiny_model` in ``directory``.

    ``directory`` must be the same path on every node. ValueError if this OpenRLHF has no such ``layout``.
    """
    generation = installed(release)
    if layout not in generation.layouts:
        raise ValueError(
            f"layout {layout}: this OpenRLHF ({release or version('openrlhf')}) has "
            f"{', '.join(generation.layouts)}"
        )
    return [*generation.layouts[layout], *generation.arguments(directory, steps, seed)]


def _sections(directory: Path, steps: int, seed: int) -> list[str]:
    """Flags in sections, advantages without a critic, a reward function."""
    return [
        *("--actor.model_name_or_path", str(directory / "model")),
        *("--data.prompt_dataset", str(directory / "prompts.jsonl")),
        *("--data.input_key", "input", "--data.label_key", "label"),
        *("--data.max_samples", str(steps * PROMPTS_PER_STEP), "--data.max_len", str(LENGTH)),
        *("--reward.remote_url", digit_reward.__file__),
        *(
            "--rollout.batch_size",
            str(PROMPTS_PER_STEP),
            "--rollout.n_samples_per_prompt",
            str(SAMPLES_PER_PROMPT),
        ),
        *("--rollout.micro_batch_size", "16", "--rollout.max_new_tokens", str(RESPONSE)),
        *("--train.batch_size", str(BATCH), "--train.micro_batch_size", "16", "--train.seed", str(seed)),
        *("--algo.advantage.estimator", "reinforce_baseline", "--algo.kl.init_coef", "0"),
        *("--algo.advantage.is_correction_level", "token"),
        *("--actor.adam.lr", "1e-2", "--actor.lr_scheduler", "constant", "--actor.lr_warmup_ratio", "0"),
        *("--ds.attn_implementation", "eager"),
        *("--vllm.tensor_parallel_size", "2", "--vllm.enforce_eager"),
        *("--vllm.gpu_memory_utilization", "0.1"),
        *("--ckpt.output_dir", str(directory / "trained"), "--ckpt.path", str(directory / "checkpoints")),
    ]


def _flat(directory: Path, steps: int, seed: int) -> list[str]:
    """Flags without sections, a critic, a reward model."""
    return [
        *("--pretrain", str(directory / "model"), "--critic_pretrain", str(directory / "model")),
        *("--reward_pretrain", str(directory / "reward")),
        *("--prompt_data", str(directory / "prompts.jsonl"), "--input_key", "input"),
        *("--max_samples", str(steps * PROMPTS_PER_STEP)),
        *("--prompt_max_len", str(LENGTH - RESPONSE), "--generate_max_len", str(RESPONSE)),
        *("--rollout_batch_size", str(PROMPTS_PER_STEP), "--n_samples_per_prompt", str(SAMPLES_PER_PROMPT)),
        *("--micro_rollout_batch_size", "16"),
        *("--train_batch_size", str(BATCH), "--micro_train_batch_size", "16", "--seed", str(seed)),
        *("--advantage_estimator", "gae", "--init_kl_coef", "0", "--bf16", "--zero_stage", "2"),
        *("--actor_learning_rate", "1e-2", "--critic_learning_rate", "1e-3"),
        *("--vllm_tensor_parallel_size", "1", "--enforce_eager"),
        *("--save_path", str(directory / "trained"), "--ckpt_path", str(directory / "checkpoints")),
    ]


GENERATIONS = (
    Generation(
        since=(0, 11),
        layouts={
            # actor on both GPUs of a node, one engine with tensor parallelism 2 on the other node
            "separate": [
                *("--actor.num_nodes", "1", "--actor.num_gpus_per_node", "2"),
                *("--vllm.num_engines", "1", "--vllm.sync_backend", "gloo"),
            ],
            # all roles on the same four GPUs; an engine per node, asleep while the actor trains
            "hybrid": [
                *("--actor.num_nodes", "2", "--actor.num_gpus_per_node", "2", "--vllm.num_engines", "2"),
                *("--train.colocate_all", "--vllm.enable_sleep", "--ds.enable_sleep"),
            ],
        },
        arguments=_sections,
        heads=2,
        reward_model=False,
    ),
    Generation(
        since=(0, 5),
        layouts={
            # actor with reference, critic with reward model, and two engines, on one GPU each
            "separate": [
                *("--actor_num_nodes", "1", "--actor_num_gpus_per_node", "1"),
                *("--ref_num_nodes", "1", "--ref_num_gpus_per_node", "1", "--colocate_actor_ref"),
                *("--critic_num_nodes", "1", "--critic_num_gpus_per_node", "1"),
                *("--reward_num_nodes", "1", "--reward_num_gpus_per_node", "1", "--colocate_critic_reward"),
                *("--vllm_num_engines", "2"),
            ],
            # actor with reference on one GPU per node, critic with reward model and an engine on the others
            "spread": [
                *("--actor_num_nodes", "2", "--actor_num_gpus_per_node", "1"),
                *("--ref_num_nodes", "2", "--ref_num_gpus_per_node", "1", "--colocate_actor_ref"),
                *("--critic_num_nodes", "1", "--critic_num_gpus_per_node", "1"),
                *("--reward_num_nodes", "1", "--reward_num_gpus_per_node", "1", "--colocate_critic_reward"),
                *("--vllm_num_engines", "1"),
            ],
        },
        arguments=_flat,
        heads=1,  # of dimension 64, the smallest that vLLM 0.4's attention supports on a CPU
        reward_model=True,
    ),
)
