"""Assertions on the events of every run that trained."""

import hashlib
import math

import pytest
from rlhf_stack.accelerator import devices

# Markers by the form of OpenRLHF's flags and by the engine of the image.
SECTIONS = pytest.mark.carries("openrlhf==0.11.2")
FLAT = pytest.mark.carries("openrlhf==0.5.1")
CPU_ENGINE = pytest.mark.skipif(devices.is_gpu(), reason="vLLM's engine for CPUs is not in this image")


def assert_trained(run, steps, backend, engines):
    assert run.code == 0, run.log
    assert [event["step"] for event in run.of("step")] == list(range(1, steps + 1))
    for event in run.of("step"):
        assert 0 <= event["reward"] <= 1
        assert math.isfinite(event["policy_loss"])
    syncs, verified = run.of("sync"), run.of("verify")
    assert [event["index"] for event in syncs] == [event["index"] for event in verified] == list(range(steps))
    assert {event["backend"] for event in syncs} == {backend}
    assert all(event["bytes"] > 0 and event["seconds"] > 0 for event in syncs)
    assert all(event["equal"] and event["parameters"] == syncs[0]["parameters"] for event in verified)
    assert [event["straddles"] for event in run.of("engine")] == [False] * engines
    assert [event["name"] for event in run.of("phase")][-3:] == ["models up", "trained", "saved"]
    assert run.left_over == []


def weights(folder):
    """Return the digest of each file with weights of a trained model."""
    files = sorted(folder.glob("*.safetensors"))
    assert files, f"no weights in {folder}"
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def assert_one_policy(run):
    for event in run.of("step"):
        assert event["actor_grad_norm"] > 0
        assert abs(event["vllm_kl"]) < 0.01, "engine and trainer disagree on the policy"


def assert_critic_trained(run):
    for event in run.of("step"):
        assert math.isfinite(event["critic_loss"])
    values = [event["values"] for event in run.of("step")]
    assert len(set(values)) == len(values), "the critic's values change with each step"


def nodes_of_trainers(run):
    """Return, by the plan, the number of ranks on each node for each trainer group."""
    (placed,) = run.of("placement")
    return {
        name: [nodes.count(node) for node in sorted(set(nodes))] for name, nodes in placed["groups"].items()
    }
