"""Packed training is padded training: equal samples, loss and gradient, where ZeRO-3 partitions the model."""

import pytest
from rlhf_stack.config import env_vars
from trained import SECTIONS, assert_one_policy, assert_trained

SECONDS, STEPS = 600, 2
# With a reference model, and a step so small that the samples of the second one are the same too.
ARGUMENTS = (
    *("--ref.num_nodes", "1", "--ref.num_gpus_per_node", "2", "--train.colocate_actor_ref"),
    *("--algo.kl.use_loss", "--algo.kl.init_coef", "0.1", "--algo.kl.estimator", "k2"),
    *("--actor.adam.lr", "1e-4", "--train.micro_batch_size", "8", "--rollout.micro_batch_size", "8"),
    *("--ds.zero_stage", "3", "--ds.attn_implementation"),
)
PADDED, PACKED = ("eager",), ("flash_attention_2", "--ds.packing_samples")


@SECTIONS
@pytest.mark.integration
@pytest.mark.timeout(2 * SECONDS + 40)
def test_packed_steps_are_the_padded_ones(train):
    """Both compute in bfloat16; measured were 0.3 %, 2 % and 0.0002."""
    runs = [
        train("separate", (2, 2), STEPS, SECONDS, *ARGUMENTS, *layout, **{env_vars.REPEATABLE: "1"})
        for layout in (PADDED, PACKED)
    ]
    for run in runs:
        assert_trained(run, steps=STEPS, backend="gloo", engines=1)
        assert_one_policy(run)
    for padded, packed in zip(*(run.of("step") for run in runs), strict=True):
        assert packed["reward"] == padded["reward"]
        assert packed["response_length"] == padded["response_length"]
        assert packed["actor_grad_norm"] == pytest.approx(padded["actor_grad_norm"], rel=0.01)
        assert packed["kl"] == pytest.approx(padded["kl"], rel=0.05)
        assert packed["policy_loss"] == pytest.approx(padded["policy_loss"], abs=0.001)
