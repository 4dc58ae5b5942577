"""The samples of a frozen actor, while the critic is warmed up."""

import pytest

PROBE = """
import ray
import torch

from openrlhf.trainer.ppo_trainer import BasePPOTrainer

replace(ray, get=lambda references, **_: references)
FREEZING, STEPS = 1, 4


def some(**given):
    return types.SimpleNamespace(**given)


@stub("the ranks of a role, which empty their buffer only after training, as upstream's do")
class Ranks:
    def __init__(self):
        self.buffer, self.trained = [], []

    def async_run_method_batch(self, method_name, experience):
        assert method_name == "append"
        self.buffer.extend(experience)
        return []

    def async_run_method(self, method_name, **options):
        if method_name == "fit":
            self.trained.append([int(one.sequences[0, 0]) for one in self.buffer])
            self.buffer.clear()
        return [{}]


def train(freezing, actor, critic):
    args = some(
        algo=some(kl=some(init_coef=0.1, target=None), advantage=some(estimator="gae")),
        ckpt=some(best_metric_key=""),
        critic=some(freezing_steps=freezing),
        ds=some(enable_sleep=False),
        logger=some(wandb=some(key=None), tensorboard_dir=None),
        train=some(dynamic_batch_enable=False),
    )
    tokenizer = stub("the tokenizer", decode=lambda *_, **__: ["text"])
    trainer = BasePPOTrainer(some(args=args), actor, critic, None, None, None, tokenizer)

    def experiences(step):
        ones = torch.ones(1)
        sequences = torch.full((1, 2), step)
        return [some(sequences=sequences, response_length=ones, truncated=ones, info={"reward": ones})]

    trainer.experience_maker = stub("the maker of experiences", make_experience_batch=experiences)
    step = 0
    while step < STEPS:
        _, step = trainer.train_step(step, step)


each = [[step] for step in range(STEPS)]
actor, critic = Ranks(), Ranks()
train(FREEZING, actor, critic)
assert critic.trained == each, critic.trained
assert actor.trained == each[FREEZING + 1 :], f"the actor trains on the samples of steps {actor.trained}"
for freezing in (-1, 1):  # without a critic
    actor = Ranks()
    train(freezing, actor, None)
    assert actor.trained == each[freezing + 1 :], f"without a critic on the samples of steps {actor.trained}"
print("an actor trains on the samples of each step in which it is not frozen")
"""


@pytest.mark.patch("openrlhf/0.11.2/0060-leave-out-samples-of-a-frozen-actor")
def test_a_frozen_actor_keeps_no_samples(proves):
    proves(PROBE, r"the actor trains on the samples of steps \[\[0, 1, 2\], \[3\]\]$")
