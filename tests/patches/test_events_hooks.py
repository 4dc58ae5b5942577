from pathlib import Path

import pytest

SECTIONS = (
    """
from openrlhf.trainer.ppo_trainer import BasePPOTrainer

arguments = types.SimpleNamespace(
    logger=types.SimpleNamespace(logging_steps=1), ckpt=types.SimpleNamespace(save_steps=float("inf"))
)
trainer = types.SimpleNamespace(args=arguments, wandb_logger=None, tensorboard_logger=None, kl_ctl=None)
logs = {"rollout/reward_mean": 0.25, "policy_loss": 1.5, "generated_samples": ["text", 0.25]}
BasePPOTrainer.save_logs_and_checkpoints(trainer, 3, logs, {})
"""
    + Path(__file__).with_name("sections.py").read_text(encoding="utf-8")
    + """
import vllm

from openrlhf.trainer.ray import vllm_engine


@stub("vLLM's engine, which is up at once")
class Engine:
    @classmethod
    def from_engine_args(cls, _):
        return cls()

    async def is_sleeping(self):
        return False


class Actor(vllm_engine.RolloutRayActor.__ray_metadata__.modified_class):
    async def __init__(self, *arguments, **options):
        replace(vllm, AsyncEngineArgs=some, AsyncLLMEngine=Engine)
        await super().__init__(*arguments, **options)

    async def sleep(self):
        pass

    async def where(self):
        return [{"node_id": "the node"}]


replace(vllm_engine, RolloutRayActor=ray.remote(Actor))
train_ppo_ray.train(args)
steps, phases = recorded("step"), sorted(recorded("phase"), key=lambda phase: phase["time"])
found = [step["step"] for step in steps], [phase["name"] for phase in phases]
expected = [3], ["started", "engine up", "models up", "trained", "saved"]
assert found == expected, f"steps and phases recorded: {found}"
assert steps[0]["reward"] == 0.25 and steps[0]["policy_loss"] == 1.5, steps
print("step 3 is recorded with reward 0.25, and each phase")
ray.shutdown()
"""
)

FLAT = (
    """
import ray
own_ray(num_cpus=4, num_gpus=2)
"""
    + Path(__file__).with_name("flat.py").read_text(encoding="utf-8")
    + """
from openrlhf.trainer.ppo_trainer import PPOTrainer

arguments = types.SimpleNamespace(logging_steps=1, eval_steps=100, save_steps=float("inf"))
trainer = types.SimpleNamespace(_wandb=None, _tensorboard=None)
logs = {"reward": 0.25, "policy_loss": 1.5, "kl": 0.5}
for is_first in (True, False):
    trainer.strategy = stub("the strategy's rank", is_rank_0=lambda: is_first)
    PPOTrainer.save_logs_and_checkpoints(trainer, arguments, 3, None, logs, {})
args.vllm_num_engines, Models.fit = 0, lambda: ray.put(1)
train_ppo_ray.train(args)
steps, phases = recorded("step"), sorted(recorded("phase"), key=lambda phase: phase["time"])
found = [step["step"] for step in steps], [phase["name"] for phase in phases]
assert found == ([3], ["started", "models up", "trained", "saved"]), f"steps and phases recorded: {found}"
assert steps[0]["reward"] == 0.25 and steps[0]["policy_loss"] == 1.5, steps
print("step 3 is recorded once, with reward 0.25, and each phase")
ray.shutdown()
"""
)


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        pytest.param(
            SECTIONS,
            r"steps and phases recorded: \(\[\], \[\]\)",
            marks=pytest.mark.patch("openrlhf/0.11.2/0008-record-steps-and-phases"),
            id="0.11",
        ),
        pytest.param(
            FLAT,
            r"steps and phases recorded: \(\[\], \[\]\)",
            marks=pytest.mark.patch("openrlhf/0.5.1/0008-record-steps-and-phases"),
            id="0.5",
        ),
    ],
)
@pytest.mark.timeout(400)
def test_steps_and_phases_are_recorded(proves, probe, reason):
    proves(probe, reason)
