"""OpenRLHF's own trainer, real vLLM engines, real DeepSpeed, on two nodes with fake GPUs.

What is usual is shown by the demo, and over layouts by test_layouts.py; here is the rest.
"""

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
def test_trainer_and_engines_share_gpus_and_sleep_in_turn(train):
    one_gpu_each = ["--actor.num_gpus_per_node", "1", "--vllm.tensor_parallel_size", "1"]
    run = train("hybrid", (1, 1), 2, SECONDS, *one_gpu_each, **{env_vars.CHECK_COTENANCY: "1"})
    assert_trained(run, steps=2, backend="ipc", engines=2)
    watched = {side: {e["gpu"] for e in run.of("cotenancy") if e["side"] == side} for side in SIDES}
    assert watched["trainer"] == watched["engine"], "both look at the GPUs that they share"
    assert len(watched["engine"]) == 2
    assert run.of("cotenancy violated") == []
    assert_one_policy(run)
    gpus = {rank["gpu"] for engine in run.of("engine") for rank in engine["ranks"]}
    nodes = {rank["node_id"] for engine in run.of("engine") for rank in engine["ranks"]}
    assert len(gpus) == len(nodes) == 2, "each engine has the GPU of its own node"


@SECTIONS
@pytest.mark.timeout(SECONDS + 40)
def test_engines_on_the_trainers_gpus_take_buckets_over_gloo(train):
    """Upstream falls into an NCCL group with two ranks on one GPU."""
    one_gpu_each = ["--actor.num_gpus_per_node", "1", "--vllm.tensor_parallel_size", "1"]
    run = train("hybrid", (1, 1), 2, SECONDS, *one_gpu_each, "--vllm.sync_backend", "gloo", **SMALL_BUCKETS)
    assert_trained(run, steps=2, backend="gloo", engines=2)
    assert_one_policy(run)
    assert run.of("sync")[0]["bytes"] > 5 * BUCKET


@SECTIONS
@pytest.mark.timeout(SECONDS + 40)
def test_the_shards_of_two_ranks_are_the_policy_that_the_engine_loaded(train):
    """Upstream on a CPU starts from weights that have not come: the loss was NaN in half of the runs."""
    run = train("separate", (2, 2), 2, SECONDS, "--ds.zero_stage", "3", **SMALL_BUCKETS)
    assert_trained(run, steps=2, backend="gloo", engines=1)
    assert_one_policy(run)


@FLAT
@CPU_ENGINE
@pytest.mark.timeout(SECONDS + 40)
def test_the_shards_of_an_actor_on_two_nodes_are_gathered_bucket_by_bucket(train):
    run = train("spread", (2, 2), 2, SECONDS, "--zero_stage", "3", **SMALL_BUCKETS)
    assert_trained(run, steps=2, backend="gloo", engines=1)
    assert_critic_trained(run)


@FLAT
@CPU_ENGINE
@pytest.mark.timeout(SECONDS + 40)
def test_an_engine_without_memory_ends_the_run_at_once_with_its_error(train):
    """Upstream's trainer waits for it in a rendezvous, half an hour."""
    run = train("separate", (2, 2), 2, SECONDS, VLLM_CPU_KVCACHE_SPACE="100000")
    assert run.code != 0
    assert run.seconds < 300
    assert "can't allocate memory" in run.log
    assert run.of("step") == []
    assert run.left_over == []


@SECTIONS
@pytest.mark.timeout(SECONDS + 40)
def test_an_engine_that_cannot_start_ends_the_run_at_once_with_its_error(train):
    """Upstream's trainer learns of it when its rendezvous times out, 300 s later."""
    one_gpu_each = ["--actor.num_gpus_per_node", "1", "--vllm.tensor_parallel_size", "1"]
    run = train("separate", (1, 1), 2, SECONDS, *one_gpu_each, VLLM_CPU_KVCACHE_SPACE="100000")
    assert run.code != 0
    assert run.seconds < 250
    assert "waiting for clients" not in run.log, "nobody waited in the rendezvous"
    assert "Engine core initialization failed" in run.log
    assert run.of("step") == []
    assert run.left_over == []
