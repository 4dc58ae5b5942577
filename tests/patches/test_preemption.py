"""A checkpoint that is requested between two steps; tests/network has a whole run."""

import pytest

REQUEST = """
import ray
import torch

from ray import cloudpickle

from openrlhf.trainer.ppo_trainer import PPOTrainer
from openrlhf.trainer.ppo_trainer_async import TrainingActor
from rlhf_stack.recovery import preemption

own_ray(num_cpus=1)
for actor_class in (PPOTrainer, TrainingActor):
    cloudpickle.dumps(actor_class.__ray_metadata__.modified_class)  # as Ray sends it to the actor's process
job = ray.get_runtime_context().get_job_id()


def some(**given):
    return types.SimpleNamespace(**given)


@stub("the ranks of a role, which record what they save")
class Ranks:
    def __init__(self):
        self.saved = []

    def async_run_method_batch(self, method_name, **options):
        return []

    def async_run_method(self, method_name, tag=None, client_states=None, **options):
        if method_name == "save_checkpoint":
            self.saved.append((tag, (client_states or {}).get("episode")))
        return [ray.put({"policy_loss": 1.0})]


@stub("the prompts")
class Prompts(list):
    def state_dict(self):
        return {}


def trainer(kind, **content):
    # As made by its constructor, which loads a tokenizer and a dataset.
    made = kind.__ray_metadata__.modified_class.__new__(kind.__ray_metadata__.modified_class)
    ones = torch.ones(1)
    experience = some(
        sequences=torch.ones(1, 2), rewards=ones, response_length=ones, truncated=ones, info={"reward": ones}
    )
    vars(made).update(
        args=some(
            algo=some(dynamic_filtering_enable=False),
            ckpt=some(
                save_steps=float("inf"), disable_ds=False, best_metric_key="", load_enable=False, path="."
            ),
            critic=some(freezing_steps=-1),
            ds=some(enable_sleep=False),
            eval=some(steps=float("inf")),
            logger=some(logging_steps=1),
            rollout=some(batch_size=1, n_samples_per_prompt=1),
            train=some(dynamic_batch_enable=False, num_episodes=1),
        ),
        experience_maker=stub("the maker of experiences", make_experience_batch=lambda _: [experience]),
        tokenizer=stub("the tokenizer", decode=lambda *_, **__: ["text"]),
        kl_ctl=some(value=0),
        actor_model_group=Ranks(), critic_model_group=Ranks(), vllm_engines=None,
        wandb_logger=None, tensorboard_logger=None,
        best_eval_metric_key="", best_eval_metric_value=float("-inf"), _latest_eval_metric_value=None,
        **content,
    )
    return made


def generated():
    yield "eval", 0, {"eval_pass1": 0.5}
    yield ["samples"], {"episode": 7}, None, 0.0
    answers.extend(preemption.request(30, job))
    yield "done"


answers, batches = [], generated()
queue = stub("the queue of generated samples", get=lambda block: next(batches))
one = trainer(TrainingActor, rollout_queue=queue, rollout_slots=stub("its slots", put=lambda *_, **__: None))
one.fit()
assert [(one.saved, one.step) for one in answers] == [(True, 1)], f"answers to the request: {answers}"
for role, episode in (one.actor_model_group, 7), (one.critic_model_group, None):
    assert role.saved == [("best_global_step0", None), ("global_step1", episode)], role.saved
[late] = preemption.request(30, job)
assert not late.saved and "ended" in late.problem, late
batches = iter([(["samples"], None, 1, False), ([], None, 0, True)])
one = trainer(
    PPOTrainer,
    prompts_dataloader=Prompts(),
    generate_kwargs={},
    samples_generator=stub("the samples' generator", generate_samples=lambda: next(batches)),
    eval_dataloader=None,
)
one.fit()
assert [step["step"] for step in recorded("step")] == [1, 1]
print("step 1 is saved on request")
ray.shutdown()
"""


@pytest.mark.patch("openrlhf/0.11.2/0057-save-on-request")
@pytest.mark.timeout(400)
def test_a_step_is_saved_on_request(proves):
    proves(REQUEST, r"answers to the request: \[\]")
