"""Log-probabilities of an answer's tokens, from vLLM and from OpenRLHF's trainer.

probabilities.py DIR: creates a tiny model in DIR and writes both to DIR/probabilities.json; vLLM prints logs.
"""

import json
import sys
from pathlib import Path

import torch
from openrlhf.models import Actor
from rlhf_stack.demo import tiny_model
from vllm import LLM, SamplingParams, TokensPrompt

PROMPT, LENGTH = list(range(20, 36)), 32


def main() -> None:
    """Sample with the engine, then compute the same log-probabilities with the trainer."""
    folder = Path(sys.argv[1])
    tiny_model.make(folder, seed=0, steps=1)
    model = str(folder / "model")
    engine = LLM(
        model=model, enforce_eager=True, dtype="bfloat16", max_model_len=128, gpu_memory_utilization=0.1
    )
    sampling = SamplingParams(max_tokens=LENGTH, min_tokens=LENGTH, logprobs=1, seed=0)
    (answer,) = engine.generate([TokensPrompt(prompt_token_ids=PROMPT)], sampling)[0].outputs
    tokens = list(answer.token_ids)
    sampled = [given[token].logprob for token, given in zip(tokens, answer.logprobs, strict=True)]
    actor = Actor(model, attn_implementation="eager", param_dtype="bf16")
    sequences = torch.tensor([[*PROMPT, *tokens]])
    attention = torch.ones_like(sequences)
    action = torch.zeros_like(sequences)[:, 1:].bool()
    action[:, len(PROMPT) - 1 :] = True
    with torch.no_grad():
        computed = actor(sequences, action, attention)
    found = {"engine": sampled, "trainer": computed[0, -LENGTH:].tolist()}
    (folder / "probabilities.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
