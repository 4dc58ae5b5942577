"""OpenRLHF's own trainer, real vLLM engines, real DeepSpeed, on two nodes with fake GPUs."""

import math

import pytest

SECONDS = 280


def assert_trained(run, steps, backend, engines):
    assert run.code == 0, run.log[-8000:]
    assert [event["step"] for event in run.of("step")] == list(range(1, steps + 1))
    for event in run.of("step"):
        assert 0 <= event["reward"] <= 1
        assert math.isfinite(event["policy_loss"])
        assert event["actor_grad_norm"] > 0
        assert abs(event["vllm_kl"]) < 0.01, "engine and trainer disagree on the policy"
    syncs, verified = run.of("sync"), run.of("verify")
    assert [event["index"] for event in syncs] == [event["index"] for event in verified] == list(range(steps))
    assert {event["backend"] for event in syncs} == {backend}
    assert all(event["bytes"] > 0 and event["seconds"] > 0 for event in syncs)
    assert all(event["equal"] and event["parameters"] == syncs[0]["parameters"] for event in verified)
    assert [event["straddles"] for event in run.of("engine")] == [False] * engines
    assert [event["name"] for event in run.of("phase")][-3:] == ["models up", "trained", "saved"]
    assert run.left_over == []


@pytest.mark.timeout(SECONDS + 40)
def test_a_tensor_parallel_engine_learns_from_another_nodes_trainer_over_gloo(train):
    run = train("separate", 2, 3, SECONDS)
    assert_trained(run, steps=3, backend="gloo", engines=1)
    (engine,) = run.of("engine")
    assert [rank["rank"] for rank in engine["ranks"]] == [0, 1]
    assert len({rank["gpu"] for rank in engine["ranks"]}) == 2


@pytest.mark.timeout(SECONDS + 40)
def test_trainer_and_engines_share_gpus_and_sleep_in_turn(train):
    one_gpu_each = ["--actor.num_gpus_per_node", "1", "--vllm.tensor_parallel_size", "1"]
    run = train("hybrid", 1, 2, SECONDS, *one_gpu_each)
    assert_trained(run, steps=2, backend="ipc", engines=2)
    gpus = {rank["gpu"] for engine in run.of("engine") for rank in engine["ranks"]}
    nodes = {rank["node_id"] for engine in run.of("engine") for rank in engine["ranks"]}
    assert len(gpus) == len(nodes) == 2, "each engine has the GPU of its own node"


@pytest.mark.timeout(SECONDS + 40)
def test_an_engine_that_cannot_start_ends_the_run_at_once_with_its_error(train):
    """Upstream's trainer learns of it when its rendezvous times out, 300 s later."""
    one_gpu_each = ["--actor.num_gpus_per_node", "1", "--vllm.tensor_parallel_size", "1"]
    run = train("separate", 1, 2, SECONDS, *one_gpu_each, VLLM_CPU_KVCACHE_SPACE="100000")
    assert run.code != 0
    assert run.seconds < 250
    assert "waiting for clients" not in run.log, "nobody waited in the rendezvous"
    assert "Engine core initialization failed" in run.log
    assert run.of("step") == []
    assert run.left_over == []
