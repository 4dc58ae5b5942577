"""A run of OpenRLHF 0.5.1 that continues from a checkpoint is the run that nobody disturbed."""

import json

import pytest
from rlhf_stack.config import env_vars
from trained import CPU_ENGINE, FLAT, weights

pytestmark = pytest.mark.integration

SECONDS = 400
STEPS_OF_EPISODE = 3
STEPS = 2 * STEPS_OF_EPISODE
SAVED = 2  # the step of the checkpoint: steps of the second episode repeat prompts from before and after it
LEARNED = "reward", "return", "policy_loss", "critic_loss", "ptx_loss", "kl", "values", "actor_lr"
TEXTS = 96  # three batches of each rank, of which a step takes two


def learned(run):
    assert run.code == 0, run.log
    return {event["step"]: [event[name] for name in LEARNED] for event in run.of("step")}


@FLAT
@CPU_ENGINE
@pytest.mark.timeout(2 * SECONDS + 40)
def test_a_run_from_a_checkpoint_is_the_undisturbed_run(train, tmp_path):
    """Two ranks train with one engine, which answers their prompts in the order of arrival.

    The coefficient of the KL penalty changes with each step, and pretraining texts are among the losses.
    """
    checkpoints, texts = tmp_path / "checkpoints", tmp_path / "texts.jsonl"
    rows = (json.dumps({"input": f"{number} + {number} = {2 * number}"}) for number in range(TEXTS))
    texts.write_text("\n".join(rows), encoding="utf-8")
    adapts = ("--init_kl_coef", "0.1", "--kl_target", "0.1", "--pretrain_data", str(texts))

    def run(name, *more):
        saved = ("--ckpt_path", str(checkpoints), "--save_steps", str(SAVED), "--max_ckpt_num", str(STEPS))
        into = ("--num_episodes", "2", "--save_path", str(tmp_path / name), *saved, *adapts, *more)
        return train("spread", (2, 2), STEPS_OF_EPISODE, SECONDS, *into, **{env_vars.REPEATABLE: "1"})

    undisturbed = learned(run("undisturbed"))
    assert list(undisturbed) == list(range(1, STEPS + 1))
    for latest in checkpoints.glob("*/latest"):
        latest.write_text(f"global_step{SAVED}")
    continued = learned(run("continued", "--load_checkpoint"))
    assert continued == {step: values for step, values in undisturbed.items() if step > SAVED}
    assert weights(tmp_path / "continued") == weights(tmp_path / "undisturbed")
