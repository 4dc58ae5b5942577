import pytest

SECTIONS = """
from openrlhf.trainer.ppo_trainer import BasePPOTrainer

arguments = types.SimpleNamespace(
    logger=types.SimpleNamespace(logging_steps=1), ckpt=types.SimpleNamespace(save_steps=float("inf"))
)
trainer = types.SimpleNamespace(args=arguments, wandb_logger=None, tensorboard_logger=None)
logs = {"rollout/reward_mean": 0.25, "policy_loss": 1.5, "generated_samples": ["text", 0.25]}
BasePPOTrainer.save_logs_and_checkpoints(trainer, 3, logs, {})
steps = recorded("step")
assert [step["step"] for step in steps] == [3], f"steps recorded: {steps}"
assert steps[0]["reward"] == 0.25 and steps[0]["policy_loss"] == 1.5, steps
print("step 3 is recorded with reward 0.25")
"""

FLAT = """
from openrlhf.trainer.ppo_trainer import PPOTrainer

arguments = types.SimpleNamespace(logging_steps=1, eval_steps=100, save_steps=float("inf"))
trainer = types.SimpleNamespace(_wandb=None, _tensorboard=None)
logs = {"reward": 0.25, "policy_loss": 1.5, "kl": 0.5}
for is_first in (True, False):
    trainer.strategy = stub("the strategy's rank", is_rank_0=lambda: is_first)
    PPOTrainer.save_logs_and_checkpoints(trainer, arguments, 3, None, logs, {})
steps = recorded("step")
assert [step["step"] for step in steps] == [3], f"steps recorded: {steps}"
assert steps[0]["reward"] == 0.25 and steps[0]["policy_loss"] == 1.5, steps
print("step 3 is recorded once, with reward 0.25")
"""


@pytest.mark.parametrize(
    "probe",
    [
        pytest.param(
            SECTIONS, marks=pytest.mark.patch("openrlhf/0.11.2/0008-record-steps-and-phases"), id="0.11"
        ),
        pytest.param(FLAT, marks=pytest.mark.patch("openrlhf/0.5.1/0008-record-steps-and-phases"), id="0.5"),
    ],
)
def test_a_training_step_is_recorded_with_its_reward(proves, probe):
    proves(probe, r"steps recorded: \[\]")
