"""A checkpoint that is requested between two steps; tests/network has a whole run."""

import pytest

REQUEST = """
import ray

from ray import cloudpickle

from openrlhf.trainer.ppo_trainer import BasePPOTrainer, PPOTrainer
from openrlhf.trainer.ppo_trainer_async import TrainingActor
from rlhf_stack.recovery import preemption

own_ray(num_cpus=1)
for actor_class in (PPOTrainer, TrainingActor):
    cloudpickle.dumps(actor_class.__ray_metadata__.modified_class)  # as Ray sends it to the actor's process


def some(**given):
    return types.SimpleNamespace(**given)


@stub("the ranks of a role, which record what they save")
class Ranks:
    def __init__(self):
        self.saved = []

    def async_run_method(self, method_name, **options):
        self.saved.append((method_name, options["tag"], options.get("client_states", {}).get("episode")))
        return [ray.put(None)]


actor, critic = Ranks(), Ranks()
arguments = some(
    logger=some(logging_steps=1), ckpt=some(save_steps=float("inf"), disable_ds=False, best_metric_key="")
)
trainer = some(
    args=arguments,
    wandb_logger=None,
    tensorboard_logger=None,
    actor_model_group=actor,
    critic_model_group=critic,
    best_eval_metric_key="",
    best_eval_metric_value=0.0,
    _latest_eval_metric_value=None,
)
BasePPOTrainer.save_logs_and_checkpoints(trainer, 3, {}, {"episode": 7, "global_step": 3})
answers = preemption.request(30, ray.get_runtime_context().get_job_id())
assert [(one.saved, one.step) for one in answers] == [(True, 3)], f"answers to the request: {answers}"
assert actor.saved == [("save_checkpoint", "global_step3", 7)], actor.saved
assert critic.saved == [("save_checkpoint", "global_step3", None)], critic.saved
print("step 3 is saved on request")
ray.shutdown()
"""


@pytest.mark.patch("openrlhf/0.11.2/0057-save-on-request")
@pytest.mark.timeout(200)
def test_a_step_is_saved_on_request(proves):
    proves(REQUEST, r"answers to the request: \[\]")
