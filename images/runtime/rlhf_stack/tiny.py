"""A model, a tokenizer and prompts small enough to train on two cores, made on the spot from a seed.

``python -m rlhf_stack.tiny --out DIR --seed 0`` writes DIR/model and DIR/prompts.jsonl;
`train_arguments` is how OpenRLHF's ``train_ppo_ray`` is called on them.
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlhf_stack import digit_reward

LAYOUTS = {
    # actor: one node with two GPUs; one engine, tensor-parallel over the two GPUs of the other node
    "separate": [
        *("--actor.num_nodes", "1", "--actor.num_gpus_per_node", "2"),
        *("--vllm.num_engines", "1", "--vllm.sync_backend", "gloo"),
    ],
    # everything on the same four GPUs of two nodes; an engine a node, asleep while the actor trains
    "hybrid": [
        *("--actor.num_nodes", "2", "--actor.num_gpus_per_node", "2", "--vllm.num_engines", "2"),
        *("--train.colocate_all", "--vllm.enable_sleep", "--ds.enable_sleep"),
    ],
}
PROMPTS_PER_STEP = 8
SAMPLES_PER_PROMPT = 8
BATCH = PROMPTS_PER_STEP * SAMPLES_PER_PROMPT
VOCABULARY = 512
LENGTH = 64
SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
NAMES = ("What is", "Add", "Say", "Compute", "How much is")


def make(out: Path, seed: int, steps: int, layers: int = 2) -> None:
    """Write a random Qwen2 of ``layers`` layers (about 150,000 parameters), its tokenizer and prompts."""
    make_model(out / "model", seed, layers)
    rows = [json.dumps({"input": prompt, "label": ""}) for prompt in prompts(seed, steps * PROMPTS_PER_STEP)]
    (out / "prompts.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


def prompts(seed: int, count: int) -> Iterator[str]:
    """``count`` short questions."""
    choose = random.Random(seed)  # noqa: S311
    for _ in range(count):
        yield f"{choose.choice(NAMES)} {choose.randrange(60)} + {choose.randrange(60)}? Answer:"


def make_model(out: Path, seed: int, layers: int = 2) -> None:
    """Write model and tokenizer; the same seed gives the same weights."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL.values()), initial_alphabet=sorted(alphabet)
    )
    raw.train_from_iterator(list(prompts(seed, 4000)), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, model_max_length=256, **SPECIAL)
    tokenizer.save_pretrained(out)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(out)


def train_arguments(layout: str, directory: Path, steps: int, seed: int) -> list[str]:
    """The arguments of ``openrlhf.cli.train_ppo_ray`` for ``steps`` optimiser steps on what `make` wrote.

    ``layout`` is one of `LAYOUTS`, each for two nodes with two GPUs. ``directory`` must be the same path on
    every node.
    """
    return [
        *LAYOUTS[layout],
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
        *("--rollout.micro_batch_size", "16", "--rollout.max_new_tokens", "16"),
        *("--train.batch_size", str(BATCH), "--train.micro_batch_size", "16", "--train.seed", str(seed)),
        *("--algo.advantage.estimator", "reinforce_baseline", "--algo.kl.init_coef", "0"),
        *("--algo.advantage.is_correction_level", "token"),
        *("--actor.adam.lr", "1e-2", "--actor.lr_scheduler", "constant", "--actor.lr_warmup_ratio", "0"),
        *("--ds.attn_implementation", "eager"),
        *("--vllm.tensor_parallel_size", "2", "--vllm.enforce_eager"),
        *("--vllm.gpu_memory_utilization", "0.1"),
        *("--ckpt.output_dir", str(directory / "trained"), "--ckpt.path", str(directory / "checkpoints")),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a tiny random model, its tokenizer and prompts to a directory."""
    parser = argparse.ArgumentParser(prog="python -m rlhf_stack.tiny", description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=28, help="training steps that the prompts must last for")
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    make(options.out, options.seed, options.steps, options.layers)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
