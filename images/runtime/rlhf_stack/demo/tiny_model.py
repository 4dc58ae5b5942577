"""Creates a model, a tokenizer and prompts, small enough to train on two cores, from a seed.

``python -m rlhf_stack.demo.tiny_model --out DIR --seed 0`` writes DIR/model, DIR/prompts.jsonl and, for an
OpenRLHF that needs a reward model, DIR/reward; `tiny_run` has the arguments of ``train_ppo_ray`` for them.
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhf_stack.demo import digit_reward_model, tiny_run
from rlhf_stack.lazy import torch

VOCABULARY = 512
HIDDEN = 64
SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
NAMES = ("What is", "Add", "Say", "Compute", "How much is")


def make(out: Path, seed: int, steps: int, layers: int = 2) -> None:
    """Write a random Qwen2 of ``layers`` layers (about 150,000 parameters), its tokenizer and prompts."""
    generation = tiny_run.installed()
    tokenizer = make_model(out / "model", seed, layers, generation.heads)
    if generation.reward_model:
        digit_reward_model.make(out / "reward", tokenizer, VOCABULARY)
    count = steps * tiny_run.PROMPTS_PER_STEP
    rows = [json.dumps({"input": prompt, "label": ""}) for prompt in prompts(seed, count)]
    (out / "prompts.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


def prompts(seed: int, count: int) -> Iterator[str]:
    """Generate ``count`` short questions."""
    choose = random.Random(seed)  # noqa: S311
    for _ in range(count):
        yield f"{choose.choice(NAMES)} {choose.randrange(60)} + {choose.randrange(60)}? Answer:"


def make_model(out: Path, seed: int, layers: int, heads: int) -> Any:
    """Write the model and its tokenizer, and return the tokenizer; weights depend only on the seed."""
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
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=HIDDEN // heads,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(out)
    return tokenizer


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a tiny random model, its tokenizer and prompts to a directory."""
    parser = argparse.ArgumentParser(prog="python -m rlhf_stack.demo.tiny_model", description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=28, help="number of training steps to write prompts for")
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    make(options.out, options.seed, options.steps, options.layers)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
