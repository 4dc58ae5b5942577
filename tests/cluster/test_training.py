"""OpenRLHF's trainer, real vLLM engines and real DeepSpeed on two nodes with simulated GPUs.

The demo covers the usual run, and test_layouts.py covers layouts.
"""

from importlib.metadata import version

import pytest
from rlhf_stack.config import env_vars
from trained import CPU_ENGINE, FLAT, SECTIONS, assert_critic_trained, assert_one_policy, assert_trained

pytestmark = pytest.mark.integration

SECONDS = 400
SIDES = ("trainer", "engine")
BUCKET = 50_000  # bytes
SMALL_BUCKETS = {env_vars.SYNC_BUCKET: str(BUCKET / 10**6)}


@SECTIONS
@pytest.mark.timeout(SECONDS + 40)
def test_trainer_and_engines_share_gpus_and_sleep_alternately(train):
    one_gpu_each = ["--actor.num_gpus_per_node", "1", "--vllm.tensor_parallel_size", "1"]
    run = train("hybrid", (1, 1), 2, SECONDS, *one_gpu_each, **{env_vars.CHECK_COTENANCY: "1"})
    assert_trained(run, steps=2, backend="ipc", engines=2)
    watched = {side: {e["gpu"] for e in run.of("cotenancy") if e["side"] == side} for side in SIDES}
    assert watched["trainer"] == watched["engine"], "both check the GPUs that they share"
    assert len(watched["engine"]) == 2
    assert run.of("cotenancy violated") == []
    assert_one_policy(run)
    gpus = {rank["gpu"] for engine in run.of("engine") for rank in engine["ranks"]}
    nodes = {rank["node_id"] for engine in run.of("engine") for rank in engine["ranks"]}
    assert len(gpus) == len(nodes) == 2, "each engine has the GPU of its own node"


@SECTIONS
@pytest.mark.timeout(SECONDS + 40)
def test_colocated_engines_receive_buckets_over_gloo(train):
    """Upstream creates an NCCL group with two ranks on one GPU."""
    one_gpu_each = ["--actor.num_gpus_per_node", "1", "--vllm.tensor_parallel_size", "1"]
    run = train("hybrid", (1, 1), 2, SECONDS, *one_gpu_each, "--vllm.sync_backend", "gloo", **SMALL_BUCKETS)
    assert_trained(run, steps=2, backend="gloo", engines=2)
    assert_one_policy(run)
    assert run.of("sync")[0]["bytes"] > 5 * BUCKET


@SECTIONS
@pytest.mark.timeout(SECONDS + 40)
def test_zero3_shards_equal_the_policy_of_the_engine(train):
    """Upstream on a CPU starts from incomplete weights: the loss was NaN in half of the runs."""
    checks = SMALL_BUCKETS | {env_vars.VERIFY_SYNC: env_vars.PROBABILITIES}
    run = train("separate", (2, 2), 2, SECONDS, "--ds.zero_stage", "3", **checks)
    assert_trained(run, steps=2, backend="gloo", engines=1)
    assert_one_policy(run)
    assert [event["version"] for event in run.of("sync")] == [1, 2]
    assert [event["mixed_answers"] for event in run.of("sync")] == [0, 0]
    computed = run.of("verify probabilities")
    assert [event["index"] for event in computed] == [0, 1]
    assert all(0 <= each < event["tolerance"] for event in computed for each in event["differences"])


@SECTIONS
@pytest.mark.timeout(SECONDS + 40)
@pytest.mark.parametrize("stage", ["0", "1"])
def test_weights_that_no_stage_shards_equal_the_policy_of_the_engine(train, stage):
    run = train("separate", (2, 2), 2, SECONDS, "--ds.zero_stage", stage, **SMALL_BUCKETS)
    assert_trained(run, steps=2, backend="gloo", engines=1)
    assert_one_policy(run)


@CPU_ENGINE
@pytest.mark.timeout(2 * SECONDS + 40)
def test_a_seed_repeats_a_run_digit_by_digit(train):
    """As the demo, which sets the same variable."""
    runs = [train("separate", (2, 2), 3, SECONDS, **{env_vars.REPEATABLE: "1"}) for _ in range(2)]
    learned = []
    for run in runs:
        assert_trained(
            run, steps=3, backend="gloo", engines=2 if version("openrlhf").startswith("0.5.1") else 1
        )
        learned.append([(event["reward"], event["policy_loss"]) for event in run.of("step")])
    assert learned[0] == learned[1]
    assert len(set(learned[0])) == 3, "the steps differ, so that equal runs show something"


@SECTIONS
@pytest.mark.timeout(SECONDS + 40)
@pytest.mark.parametrize("rate", ["1e-6", "5e-7"])
def test_few_elements_change_at_a_learning_rate_of_rlhf(train, rate):
    """All weights are sent in the first and the fifth sync; every sync is compared by checksum."""
    variables = {env_vars.SYNC_SPARSE: "on", env_vars.SYNC_FULL_EVERY: "4"} | SMALL_BUCKETS
    run = train("separate", (2, 2), 6, SECONDS, "--actor.adam.lr", rate, **variables)
    assert_trained(run, steps=6, backend="gloo", engines=1)
    assert_one_policy(run)
    shares = [event["sent"] / event["bytes"] for event in run.of("sync")]
    assert [share > 0.9 for share in shares] == [True, False, False, False, True, False], shares
    assert max(share for share in shares if share < 0.9) <= 0.05, shares


@FLAT
@CPU_ENGINE
@pytest.mark.timeout(SECONDS + 40)
def test_zero3_shards_on_two_nodes_are_gathered_by_bucket(train):
    run = train("spread", (2, 2), 2, SECONDS, "--zero_stage", "3", **SMALL_BUCKETS)
    assert_trained(run, steps=2, backend="gloo", engines=1)
    assert_critic_trained(run)


@FLAT
@CPU_ENGINE
@pytest.mark.timeout(SECONDS + 40)
def test_engine_without_memory_ends_the_run_at_once(train):
    """Upstream's trainer waits half an hour in a rendezvous."""
    run = train("separate", (2, 2), 2, SECONDS, VLLM_CPU_KVCACHE_SPACE="100000")
    assert run.code != 0
    assert run.seconds < 300
    assert "can't allocate memory" in run.log
    assert run.of("step") == []
    assert run.left_over == []


@SECTIONS
@pytest.mark.timeout(SECONDS + 40)
def test_engine_that_cannot_start_ends_the_run_at_once(train):
    """Upstream's trainer notices it when its rendezvous times out after 300 s."""
    one_gpu_each = ["--actor.num_gpus_per_node", "1", "--vllm.tensor_parallel_size", "1"]
    run = train("separate", (1, 1), 2, SECONDS, *one_gpu_each, VLLM_CPU_KVCACHE_SPACE="100000")
    assert run.code != 0
    assert run.seconds < 250
    assert "waiting for clients" not in run.log, "no rank waited in the rendezvous"
    assert "Engine core initialization failed" in run.log
    assert run.of("step") == []
    assert run.left_over == []


@SECTIONS
@CPU_ENGINE
@pytest.mark.integration
@pytest.mark.timeout(SECONDS + 40)
def test_answers_that_mix_versions_are_logged_with_the_step_of_asynchronous_training(train):
    """Weights are sent while engines generate: answers begin with one version and end with the next."""
    asynchronous = "--train.async_enable", "--train.partial_rollout_enable"
    run = train("separate", (2, 2), 4, SECONDS, *asynchronous)
    steps, syncs = run.of("step"), run.of("sync")
    assert run.code == 0, run.log
    assert [step["weights/version"] for step in steps] == [sync["version"] for sync in syncs]
    assert [step["weights/mixed_answers"] for step in steps] == [sync["mixed_answers"] for sync in syncs]
    assert sum(step["weights/mixed_answers"] for step in steps) > 0
