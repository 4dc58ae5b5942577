"""The samples of an episode's last step, which the prompts do not fill."""

import pytest

RUN = """
import queue

import ray
import torch
from torch.utils.data import DataLoader

from openrlhf.trainer.ppo_trainer import PPOTrainer
from openrlhf.trainer.ppo_trainer_async import GenerateSamplesActor, TrainingActor
from openrlhf.trainer.ppo_utils import samples_generator
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ray.launcher import RayActorGroup

replace(ray, get=lambda references, **_: references, put=lambda content: content)
RANKS, PROMPTS, EACH, MICRO = 4, 16, 2, 4  # 8 micro batches fill a step, two for each rank


def some(**given):
    return types.SimpleNamespace(**given)


args = some(
    actor=some(num_nodes=1, num_gpus_per_node=RANKS),
    algo=some(
        advantage=some(estimator="reinforce"), dynamic_filtering_enable=False, kl=some(init_coef=0)
    ),
    ckpt=some(load_enable=False, path="."),
    critic=some(model_name_or_path=None, freezing_steps=-1),
    ds=some(ring_attn_size=1, tensor_parallel_size=1, enable_sleep=False),
    eval=some(steps=float("inf")),
    reward=some(remote_url=["reward.py"]),
    rollout=some(
        batch_size=PROMPTS, n_samples_per_prompt=EACH, micro_batch_size=MICRO,
        vllm_generate_batch_size=PROMPTS,
    ),
    train=some(batch_size=PROMPTS * EACH // 2, dynamic_batch_enable=False, num_episodes=2),
    vllm=some(enable_sleep=False),
)


def answers(own, dataloader_iter, num_prompts, **_):
    drawn = samples_generator._collect_prompt_batch(dataloader_iter, num_prompts)
    one = torch.ones(1)
    samples = [
        Experience(
            sequences=torch.ones(1, 2), rewards=one, response_length=one, truncated=one, info={"reward": one}
        )
        for _ in range(EACH * len(drawn[0]))
    ]
    return samples, len(drawn[0]), drawn[-1]


replace(samples_generator.SamplesGenerator, _generate_vllm=answers)


@stub("a rank, which loads its samples as upstream's")
class Rank:
    failure = ""

    def __init__(self):
        self.execute_batch, self.fit = some(remote=self.append), some(remote=self.train)
        self.batches, self.trained = [], []

    def append(self, method, chunk, start, end):
        self.batches = chunk["experience"]

    def train(self, kl_ctl):
        samples = [one for batch in self.batches for one in batch.sequences]
        self.trained.append(len(samples))
        try:
            DataLoader(samples, shuffle=True)
        except ValueError as error:
            Rank.failure = str(error)
        return {}


@stub("the prompts")
class Prompts(list):
    def state_dict(self):
        return {}


def made(kind, ranks, prompts):
    # As by its constructor, which loads a tokenizer and a dataset.
    own = kind.__ray_metadata__.modified_class.__new__(kind.__ray_metadata__.modified_class)
    group = RayActorGroup.__new__(RayActorGroup)
    group._actor_handlers, group.duplicate_actors = ranks, 1
    tokenizer = stub("the tokenizer", decode=lambda *_, **__: ["text"], pad_token_id=0)
    strategy = some(args=args)
    maker = RemoteExperienceMaker(group, None, None, None, None, strategy, tokenizer)
    vars(own).update(
        args=args, actor_model_group=group, critic_model_group=None, vllm_engines=None, tokenizer=tokenizer,
        prompts_dataloader=prompts, eval_dataloader=None, generate_kwargs={}, kl_ctl=some(value=0),
        experience_maker=stub("a maker of experiences", make_experience_batch=maker.split_rollout_samples),
        samples_generator=samples_generator.SamplesGenerator(strategy, prompts, None, tokenizer, None),
        save_logs_and_checkpoints=stub("nothing is saved", save=lambda *_: None).save,
        restore_best_checkpoint_state=stub("no state", restore=lambda _: None).restore,
        wandb_logger=None, tensorboard_logger=None,
    )
    return own


def dataset(count):
    return Prompts((None, [f"prompt {index}"], [""], [None]) for index in range(count))


def run(count):
    ranks = [Rank() for _ in range(RANKS)]
    made(PPOTrainer, ranks, dataset(count)).fit()
    return [list(step) for step in zip(*(rank.trained for rank in ranks))]


def run_async(count):
    ranks, batches, slots = [Rank() for _ in range(RANKS)], queue.Queue(), queue.Queue()
    slots.put(0)
    own = made(GenerateSamplesActor, [], dataset(count))
    own._partial_rollout, own._eval_just_done = True, False
    own.rollout_slots = stub(
        "slots that are free at once", get=lambda **_: slots.get(timeout=9), put=slots.put
    )
    own.rollout_queue = stub("a queue that a trainer empties", put=lambda batch, **_: (
        batches.put(batch), batch == "done" or slots.put(0)
    ))
    own.fit(0, 0)
    assert slots.qsize() == 1, f"the generator ends with {slots.qsize()} slots"
    trainer = made(TrainingActor, ranks, [])
    trainer.rollout_queue, trainer.rollout_slots = batches, queue.Queue()
    trainer.fit()
    return [list(step) for step in zip(*(rank.trained for rank in ranks))]
"""

UNEVEN = """
FULL, HALF = [8] * RANKS, [4] * RANKS
for loop in run, run_async:
    found = loop(PROMPTS + 9)
    assert not Rank.failure, f"samples of the last step by rank {found[1]}: {Rank.failure}"
    assert found == [FULL, HALF] * 2, found
    assert loop(2 * PROMPTS) == [FULL] * 4
    assert loop(PROMPTS + 8) == [FULL, HALF] * 2
    assert loop(PROMPTS + 7) == [FULL] * 2, "each step of the optimizer has its own samples"
    assert loop(PROMPTS // 2) == [HALF] * 2
print("the last step has the samples that all ranks can train alike")
"""

NOTHING = """
for loop in run, run_async:
    for count in 0, PROMPTS // 2 - 1:
        try:
            trained = loop(count)
        except RuntimeError as error:
            assert "nothing was trained" in str(error) and "at least 8 prompts" in str(error), error
        else:
            raise AssertionError(f"a run whose steps are {trained} ends as one that has trained")
print("a run that has trained nothing saves no model")
"""


@pytest.mark.patch("openrlhf/0.11.2/0069-leave-out-an-incomplete-last-batch")
def test_all_ranks_train_alike_in_the_last_step(proves):
    proves(RUN + UNEVEN, r"samples of the last step by rank \[8, 8, 2, 0\]: num_samples should be a positive")


@pytest.mark.patch("openrlhf/0.11.2/0069-leave-out-an-incomplete-last-batch")
def test_a_run_that_trains_nothing_fails(proves):
    proves(RUN + NOTHING, r"a run whose steps are \[\] ends as one that has trained")
