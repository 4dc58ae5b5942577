"""What becomes of a prompt whose engine is killed while it generates, with upstream's own generation loop."""

import pytest

GENERATION = """
import functools
import signal
import tempfile

import ray

from openrlhf.trainer.ppo_utils import samples_generator

own_ray(num_cpus=2)
once = os.path.join(tempfile.mkdtemp(), "killed")  # Ray may also restart an actor that starts slowly


def some(**given):
    return types.SimpleNamespace(**given)


# Ray restarts it, as the engines that the patch creates.
@stub("an engine, which kills itself")
@ray.remote(num_cpus=0, max_restarts=1)
class Engine:
    def __init__(self, number):
        self.number = number

    def unfinished_work(self):
        return 0

    def generate_responses(self, prompt, **_):
        if self.number == 0 and not os.path.exists(once):
            open(once, "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return ["answer to " + prompt]


prompts = ["first prompt", "second prompt", "third prompt", "fourth prompt"]
replace(samples_generator, _collect_prompt_batch=lambda *_: (prompts, prompts, None, True))
generator = stub(
    "the state of the samples' generator",
    args=some(
        algo=some(advantage=some(is_correction_level="off")), rollout=some(n_samples_per_prompt=1)
    ),
    vllm_engines=[Engine.remote(0), Engine.remote(1)],
    tokenizer=lambda texts, **_: {"input_ids": [list(text) for text in texts]},
    _process_response_into_experience=lambda response, **_: response,
)
own = samples_generator.SamplesGenerator
generator._dispatch_prompts_to_vllm = functools.partial(own._dispatch_prompts_to_vllm, generator)
answers, _, _ = own._generate_vllm(generator, None, len(prompts), False, max_new_tokens=32, max_len=64)
assert sorted(answers) == sorted("answer to " + prompt for prompt in prompts), answers
print("each prompt has one answer")
ray.shutdown()
"""


@pytest.mark.patch("openrlhf/0.11.2/0056-restart-lost-engines")
@pytest.mark.timeout(400)
def test_the_prompts_of_a_killed_engine_are_answered(proves):
    proves(GENERATION, r"ray\.exceptions\.\w*Actor\w*Error")
