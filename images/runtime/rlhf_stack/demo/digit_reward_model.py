"""A reward model with constructed weights: its score is the share of digits in prompt and response.

It has one Qwen2 layer. The first element of an embedding is the share of digits in its token, the second a
constant. Queries and keys are zero, so attention averages over all tokens so far; the value head reads the
average.
"""

from pathlib import Path
from typing import Any

from rlhf_stack.demo.digit_reward import share_of_digits
from rlhf_stack.lazy import torch

HIDDEN = 64
SHARE, CONSTANT, MEAN = 0, 1, 2  # meaning of the first elements of the hidden state
WEIGHT = 4.0  # of the constant: keeps the norms, and so the result, linear within 3 %


def make(out: Path, tokenizer: Any, vocabulary: int) -> None:
    """Write the model in OpenRLHF's format for reward models: a backbone and ``value_head.weight``.

    ``vocabulary`` may exceed the size of the tokenizer; the additional tokens have no text.
    """
    from safetensors.torch import save_file
    from transformers import Qwen2Config, Qwen2Model

    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    weights = {
        name: torch.ones_like(value) if name.endswith("norm.weight") else torch.zeros_like(value)
        for name, value in Qwen2Model(config).state_dict().items()
    }
    weights["embed_tokens.weight"][:, SHARE] = torch.tensor(
        [share_of_digits(tokenizer.decode([token])) for token in range(vocabulary)]
    )
    weights["embed_tokens.weight"][:, CONSTANT] = WEIGHT
    weights["layers.0.self_attn.v_proj.weight"][0, SHARE] = 1
    weights["layers.0.self_attn.o_proj.weight"][MEAN, 0] = HIDDEN**-0.5
    head = torch.zeros(1, HIDDEN)
    head[0, MEAN] = WEIGHT**2 * HIDDEN**-0.5
    stored = {f"model.{name}": value for name, value in weights.items()} | {"value_head.weight": head}
    config.save_pretrained(out)
    content = {name: value.to(torch.bfloat16).contiguous() for name, value in stored.items()}
    save_file(content, out / "model.safetensors", metadata={"format": "pt"})
