"""The log-probability of each token of an answer, as engines gave it and as OpenRLHF's trainer computes it.

probabilities_of_vllm_0_4.py DIR SIZE...: makes a tiny model in DIR, has an engine of OpenRLHF for each tensor
parallelism SIZE answer, and writes both by SIZE to DIR/probabilities.json.
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
    """Sample with the engines, then ask the trainer."""
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
        asked = engine.generate.remote(sampling_params=sampling, prompt_token_ids=PROMPTS)
        answers = [output.outputs[0] for output in ray.get(asked, timeout=SECONDS)]
        found[size] = {
            "engine": [
                given[token].logprob
                for answer in answers
                for token, given in zip(answer.token_ids, answer.logprobs, strict=True)
            ],
            "trainer": [
                number
                for prompt, answer in zip(PROMPTS, answers, strict=True)
                for number in computed(actor, [*prompt, *answer.token_ids])
            ],
        }
    Path(folder, "probabilities.json").write_text(json.dumps(found))
    ray.shutdown()


def computed(actor: Actor, tokens: list[int]) -> list[float]:
    """Of the last `LENGTH` of ``tokens``."""
    sequence = torch.tensor([tokens])
    with torch.no_grad():
        return actor(sequence, LENGTH, torch.ones_like(sequence))[0].tolist()


if __name__ == "__main__":
    main()
