"""Compare the log-probability of each answer token between an engine and OpenRLHF's trainer.

probabilities_of_vllm_0_4.py DIR SIZE...: creates a tiny model in DIR, generates answers with an engine of
OpenRLHF for each tensor parallelism SIZE, and writes both by SIZE to DIR/probabilities.json.
"""

import json
import os
import sys
from pathlib import Path

import ray
import torch
from openrlhf.models import Actor
from openrlhf.trainer.ray import create_vllm_engines
from rlhf_stack.demo import tiny_model
from vllm import SamplingParams

PROMPTS, LENGTH, SECONDS = [list(range(20, 20 + length)) for length in (5, 16, 21)], 32, 600
HEADS = 8


def main() -> None:
    """Sample with the engines, then compute the same tokens with the trainer's model."""
    folder, *sizes = sys.argv[1:]
    tiny_model.HIDDEN = 32 * HEADS
    model = str(Path(folder, "model"))
    tiny_model.make_model(Path(model), seed=0, layers=2, heads=HEADS)
    gpus = sum(map(int, sizes))
    ray.init(
        num_cpus=2 * gpus,
        num_gpus=gpus,
        object_store_memory=100 << 20,
        include_dashboard=False,
        runtime_env={"worker_process_setup_hook": os.environ["RLHF_STACK_TEST_HOOK"]},
    )
    actor = Actor(model, bf16=True)
    found = {}
    for size in sizes:
        (engine,) = create_vllm_engines(1, int(size), model, 0, False, True, 128)
        sampling = SamplingParams(max_tokens=LENGTH, min_tokens=LENGTH, logprobs=1, seed=0)
        reference = engine.generate.remote(sampling_params=sampling, prompt_token_ids=PROMPTS)
        answers = [output.outputs[0] for output in ray.get(reference, timeout=SECONDS)]
        found[size] = {
            "engine": [
                logprobs[token].logprob
                for answer in answers
                for token, logprobs in zip(answer.token_ids, answer.logprobs, strict=True)
            ],
            "trainer": [
                number
                for prompt, answer in zip(PROMPTS, answers, strict=True)
                for number in trainer_logprobs(actor, [*prompt, *answer.token_ids])
            ],
        }
    Path(folder, "probabilities.json").write_text(json.dumps(found))
    ray.shutdown()


def trainer_logprobs(actor: Actor, tokens: list[int]) -> list[float]:
    """Return the log-probabilities of the last `LENGTH` of ``tokens``."""
    sequence = torch.tensor([tokens])
    with torch.no_grad():
        return actor(sequence, LENGTH, torch.ones_like(sequence))[0].tolist()


if __name__ == "__main__":
    main()
