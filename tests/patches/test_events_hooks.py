PROBE = """
pretend_flash_attn()
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


def test_a_training_step_is_recorded_with_its_reward(proves):
    proves(PROBE, r"steps recorded: \[\]")
