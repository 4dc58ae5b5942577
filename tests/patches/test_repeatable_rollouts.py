import pytest

SHUFFLE = """
os.environ["RLHF_STACK_REPEATABLE"] = "1"
import torch
from openrlhf.trainer import ppo_trainer


def namespace(**values):
    return types.SimpleNamespace(**values)


args = namespace(
    data=namespace(
        prompt_dataset="", prompt_probs=None, prompt_split="train", max_samples=8, input_template=None,
        dataloader_num_workers=0,
    ),
    train=namespace(seed=1234567, batch_size=8, num_episodes=1, max_epochs=1),
    rollout=namespace(n_samples_per_prompt=1),
    eval=namespace(dataset=None),
)


@stub("a data set")
class Prompts(list):
    collate_fn = None

    def select(self, chosen):
        return self


replace(
    ppo_trainer,
    blending_datasets=lambda *_, **__: Prompts(range(8)),
    PromptDataset=lambda data, *_, **__: data,
)
strategy = stub("the strategy's loader", args=args, setup_dataloader=lambda *_, **__: torch.initial_seed())
seed = ppo_trainer.prepare_datasets(strategy, None)[0]
assert seed == args.train.seed, f"prompts are shuffled by the seed {seed}"
print("prompts are shuffled by --train.seed")
"""

REQUESTS = """
import asyncio

os.environ["RLHF_STACK_REPEATABLE"] = "1"
from vllm import SamplingParams
from openrlhf.trainer.ray.vllm_engine import RolloutRayActor

Actor = RolloutRayActor.__ray_metadata__.modified_class


@stub("the vLLM of an engine")
class Engine:
    def __init__(self):
        self.seeds = []

    async def generate(self, prompt, parameters, request_id):
        self.seeds.append(parameters.seed)
        yield types.SimpleNamespace(outputs=[])


def seeds():
    actor = Actor.__new__(Actor)
    actor.kwargs, actor.llm, actor._mm_pad_token_ids = {"seed": 7}, Engine(), None
    for prompt in ([1, 2], [1, 2], [3]):
        asyncio.run(actor.generate(prompt, SamplingParams()))
    return actor.llm.seeds


first = seeds()
assert None not in first, f"requests without their own seed: {first}"
assert len(set(first)) == 3, first
assert seeds() == first, "another run with the same seed has other request seeds"
print("each request has its own seed, the same in the next run")
"""

TRAINING = """
import torch

os.environ["RLHF_STACK_REPEATABLE"] = "1"
from openrlhf.trainer.ppo_trainer import BasePPOTrainer
from openrlhf.trainer.ray import ppo_actor, ppo_critic


def some(**given):
    return types.SimpleNamespace(**given)


def loader(buffer, **_):
    raise StopIteration(torch.initial_seed())


def seed_of(module, trainer, *arguments):
    found = set()
    for before in (1, 2):
        torch.manual_seed(before)
        buffer = some(items=[some(sequences=torch.tensor([5]))], sample_batch_size=1, collate_fn=None)
        args = some(train=some(dynamic_batch_enable=False), ds=some(tensor_parallel_size=1))
        optimizer = torch.optim.SGD([torch.zeros(1)])
        rank = some(
            replay_buffer=buffer, args=args, strategy=some(ring_attn_group=None), dataloader_pin_memory=False,
            actor_optim=optimizer, critic_optim=optimizer,
        )
        replace(module, DataLoader=loader)
        try:
            trainer.ppo_train(rank, *arguments)
        except StopIteration as stopped:
            found.add(stopped.value)
    return found


actor = seed_of(ppo_actor, ppo_actor.ActorPPOTrainer, 0.0)
critic = seed_of(ppo_critic, ppo_critic.CriticPPOTrainer)
assert len(actor) == len(critic) == 1, f"the order of training follows from earlier draws: {actor} {critic}"
print("equal samples are trained in the same order, whatever was drawn before")
"""

BATCH = """
os.environ["RLHF_STACK_REPEATABLE"] = "1"
from vllm import SamplingParams
from openrlhf.trainer.ray.vllm_engine import LLMRayActor

Actor = LLMRayActor.__ray_metadata__.modified_class


@stub("the vLLM of an engine")
class Engine:
    def __init__(self):
        self.llm_engine = types.SimpleNamespace(model_config=types.SimpleNamespace(seed=7))

    def generate(self, sampling_params, prompt_token_ids):
        each = sampling_params if isinstance(sampling_params, list) else [sampling_params]
        return [types.SimpleNamespace(seed=one.seed, outputs=[]) for one in each]


def seeds():
    actor = Actor.__new__(Actor)
    actor.llm = Engine()
    answers = actor.generate(sampling_params=SamplingParams(), prompt_token_ids=[[1, 2], [1, 2], [3]])
    return [answer.seed for answer in answers]


first = seeds()
assert None not in first, f"requests without their own seed: {first}"
assert len(set(first)) == 3, first
assert seeds() == first, "another run with the same seed has other request seeds"
print("each request has its own seed, the same in the next run")
"""

CRITIC = """
import torch

os.environ["RLHF_STACK_REPEATABLE"] = "1"
from openrlhf.trainer import ppo_trainer
from openrlhf.trainer.ray import ppo_critic


@stub("the loader of a trainer")
class Loader:
    def __init__(self, buffer, **_):
        raise StopIteration([int(item.sequences[0]) for item in buffer.items])


replace(ppo_critic, DataLoader=Loader)
replace(ppo_trainer, DataLoader=Loader)
found, seeds = set(), set()
optimizer = torch.optim.SGD([torch.zeros(1)])
model = types.SimpleNamespace(optimizer=optimizer, model=types.SimpleNamespace(optimizer=optimizer))
for before, arrival in enumerate(([3, 1, 2], [2, 3, 1])):
    torch.manual_seed(before)
    items = [
        types.SimpleNamespace(**dict.fromkeys(("sequences", "values", "returns"), torch.tensor([number])))
        for number in arrival
    ]
    buffer = types.SimpleNamespace(items=items, sample_batch_size=1, collate_fn=None)
    trainer = types.SimpleNamespace(
        replay_buffer=buffer, dataloader_pin_memory=False, actor=model, critic=model
    )
    for train in (ppo_critic.CriticPPOTrainer.ppo_train, ppo_trainer.PPOTrainer.ppo_train):
        try:
            train(trainer)
        except StopIteration as stopped:
            found.add(tuple(stopped.value))
            seeds.add(torch.initial_seed())
assert len(found) == 1, f"the critic trains in the order of arrival: {sorted(found)}"
assert len(seeds) == 1, f"the order of training follows from earlier draws: {seeds}"
print("the critic trains in the same order, and equal samples whatever was drawn before")
"""


STEPS = """
os.environ["RLHF_STACK_REPEATABLE"] = "1"
import torch
import vllm
from openrlhf.trainer import ppo_trainer
from openrlhf.trainer.ppo_utils import experience_maker


def some(**given):
    return types.SimpleNamespace(**given)


@stub("vLLM's parameters")
class Parameters:
    def __init__(self, seed=None, **_):
        raise StopIteration(seed)


class Reached(Exception):
    pass


def reach(*_, **__):
    raise Reached


replace(vllm, SamplingParams=Parameters)
replace(torch.distributed, get_rank=lambda: 0, get_world_size=lambda: 1)
args = some(
    train_batch_size=1, rollout_batch_size=1, n_samples_per_prompt=1, max_epochs=1, num_episodes=9, seed=7,
    eval_steps=1, save_steps=1,
)


@stub("a loader of prompts")
class Loader(list):
    sampler = None


def seed_after(steps):
    maker = stub("an experience maker", make_experience_list=reach)
    strategy = stub("the strategy of a rank", is_rank_0=lambda: False)
    trainer = some(strategy=strategy, experience_maker=maker, generate_kwargs={})
    try:
        ppo_trainer.PPOTrainer.fit(trainer, args, Loader(["a prompt"]), None, consumed_samples=steps)
    except Reached:
        pass
    rank = some(vllm_engines=["engine"], strategy=some(args=args))
    try:
        experience_maker.RemoteExperienceMaker._generate_vllm(rank, ["a prompt"])
    except StopIteration as stopped:
        return stopped.value


first, second, again = seed_after(0), seed_after(1), seed_after(1)
assert first != second, f"the samples of a step do not follow from the step: {first} {second}"
assert second == again
print("a step has its own seed, also if the run was continued before it")
"""


@pytest.mark.patch("openrlhf/0.5.1/0009-make-rollouts-repeatable")
def test_a_step_has_its_own_seed(proves):
    proves(STEPS, r"the samples of a step do not follow from the step")


@pytest.mark.patch("openrlhf/0.5.1/0009-make-rollouts-repeatable")
def test_each_request_of_a_batch_has_its_own_seed(proves):
    proves(BATCH, r"requests without their own seed")


@pytest.mark.patch("openrlhf/0.5.1/0009-make-rollouts-repeatable")
def test_a_critic_trains_in_a_repeatable_order(proves):
    proves(CRITIC, r"the critic trains in the order of arrival")


@pytest.mark.patch("openrlhf/0.11.2/0009-make-rollouts-repeatable")
def test_the_order_of_training_is_repeatable(proves):
    proves(TRAINING, r"the order of training follows from earlier draws")


@pytest.mark.patch("openrlhf/0.11.2/0009-make-rollouts-repeatable")
def test_each_request_has_its_own_seed(proves):
    proves(REQUESTS, r"requests without their own seed")


@pytest.mark.patch("openrlhf/0.11.2/0009-make-rollouts-repeatable")
def test_the_seed_of_the_run_shuffles_the_prompts(proves):
    proves(SHUFFLE, r"prompts are shuffled by the seed \d+")
