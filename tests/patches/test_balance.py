"""How evenly upstream's own code distributes prompts of very different lengths over recorded engines."""

import pytest

LENGTHS = """
from collections import Counter

LONG, SHORT, ANSWER = 400, 20, 32


def some(**given):
    return types.SimpleNamespace(**given)


def judge(work):
    # The busiest engine decides when the batch is done; here a perfect split exists.
    latest = max(work.values()) * len(work) / sum(work.values())
    if latest > 1.1:
        print(f"prompts are split by number: the last engine is done after {latest:.2f} times the mean")
        sys.exit(1)
"""

SECTIONS = (
    LENGTHS
    + """
import ray

from openrlhf.trainer.ppo_utils import samples_generator

work = Counter()


@stub("an engine, which counts tokens")
class Engine:
    def __init__(self, number):
        self.get_num_unfinished_requests = self.unfinished_work = some(remote=lambda: 0)
        self.generate_responses = some(remote=lambda prompt, **_: self.take(number, prompt))

    def take(self, number, prompt):
        work[number] += len(prompt) + ANSWER
        return prompt


def tokenizer(texts, **_):
    return {"input_ids": [list(text) for text in texts]}


replace(ray, get=lambda references, timeout=None: references)
prompts = [("l" * LONG if index % 2 else "s" * SHORT) + str(index) for index in range(32)]
generator = some(
    args=some(
        algo=some(advantage=some(is_correction_level="off")), rollout=some(n_samples_per_prompt=1)
    ),
    vllm_engines=[Engine(0), Engine(1)],
    tokenizer=tokenizer,
)
dispatch = samples_generator.SamplesGenerator._dispatch_prompts_to_vllm
answers = dispatch(generator, prompts, prompts, max_new_tokens=ANSWER, max_len=512)
judge(work)
assert answers == prompts, "answers are in the order of the prompts"
print("prompts are balanced by their tokens")
"""
)

FLAT = (
    LENGTHS
    + """
from openrlhf.trainer.ppo_utils import experience_maker

torch = importlib.import_module("torch")
alone()
on_cpu()
replace_module("vllm", SamplingParams=some)
work = Counter()


@stub("an engine, which counts tokens")
class Engine:
    def __init__(self, number):
        self.generate = some(remote=lambda prompt_token_ids, **_: self.take(number, prompt_token_ids))

    def take(self, number, prompts):
        work[number] += sum(len(tokens) + ANSWER for tokens in prompts)
        return [some(prompt_token_ids=tokens, outputs=[some(token_ids=[1])]) for tokens in prompts]


def get(references):
    judge(work)
    return references


replace(experience_maker, ray=some(get=get))
lengths = [LONG if index < 16 else SHORT for index in range(32)]
prompts = [[index + 10] * length for index, length in enumerate(lengths)]
mask = torch.ones(1, 1)
maker = stub(
    "the models' part of the experience maker",
    vllm_engines=[Engine(0), Engine(1)],
    strategy=some(args=some(seed=1, n_samples_per_prompt=1, micro_rollout_batch_size=1)),
    tokenize_fn=lambda texts, *_, **__: {"input_ids": texts},
    prompt_max_len=512, packing_samples=False, tokenizer=some(pad_token_id=0, eos_token_id=1),
    actor=some(process_sequences=lambda sequences, *_: (sequences, mask, mask)),
)
generate = experience_maker.RemoteExperienceMaker._generate_vllm
samples = generate(maker, prompts, max_new_tokens=ANSWER)
found = [sample.sequences[0, 0].item() for sample in samples]
assert found == [prompt[0] for prompt in prompts], "samples are in the order of the prompts"
print("prompts are balanced by their tokens")
"""
)


@pytest.mark.patch("openrlhf/0.11.2/0034-balance-prompts-by-tokens")
def test_long_prompts_do_not_all_go_to_one_engine(proves):
    proves(SECTIONS, "the last engine is done after 1.7. times the mean")


@pytest.mark.patch("openrlhf/0.5.1/0033-balance-prompts-by-tokens")
def test_long_prompts_do_not_all_go_to_one_engine_of_the_older_trainer(proves):
    proves(FLAT, "the last engine is done after 1.7. times the mean")
