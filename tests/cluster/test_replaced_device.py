"""Engines of vLLM 0.4.2 with tensor parallelism, on nodes as clusters have them; their GPUs are replaced.

vLLM's engine for CPUs has a single rank (test_layouts.py), and is in the images for CPUs alone.
`replaced/device_of_vllm_0_4.py` lists what replaces a GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import replacing
from driver import HOOK
from rlhf_stack.config import env_vars
from trained import FLAT, assert_critic_trained, assert_trained, nodes_of_trainers

pytestmark = [pytest.mark.integration, FLAT]

SECONDS = 900
STEPS = 3  # OpenRLHF's first step has a learning rate of 0: the second sync is the first with new weights
LEVELS = (1, 2, 4, 8)
CELL = json.loads(Path("/etc/rlhf-stack/cell.json").read_text(encoding="utf-8"))["id"]
DEVICE = {
    **replacing.TRAINER,
    **replacing.path(),
    env_vars.ACCELERATOR: "rocm" if "rocm" in CELL else "cuda",  # also where the image says cpu
    HOOK: "device_of_vllm_0_4.install",
    # Workers that Ray starts ahead lack the hook, and none of them would be used.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
}
GLOO = "--vllm_sync_backend", "gloo"
NO_CRITIC = "--advantage_estimator", "reinforce"


def engines(count, size):
    counts = "--vllm_num_engines", str(count), "--vllm_tensor_parallel_size", str(size)
    return *counts, *GLOO


def actor(nodes, gpus):
    of_both = [("--actor", nodes, gpus), ("--ref", nodes, gpus)]
    return [
        text
        for role, *counts in of_both
        for name, count in zip(("nodes", "gpus_per_node"), counts, strict=True)
        for text in (f"{role}_num_{name}", str(count))
    ]


def assert_all_ranks_answered(run, count, size):
    """Each rank of each engine has its own GPU, and took part in the answers of each step's policy."""
    engines_ranks = [engine["ranks"] for engine in run.of("engine")]
    assert [[rank["rank"] for rank in ranks] for ranks in engines_ranks] == [list(range(size))] * count
    each = [rank for ranks in engines_ranks for rank in ranks]
    assert len({(rank["node_id"], rank["gpu"]) for rank in each}) == count * size
    held = {rank["pid"]: set() for rank in each}
    for step in run.of("engine step"):
        held[step["pid"]].add(step["weights"])
    assert [len(weights) for weights in held.values()] == [STEPS - 1] * len(each), held


@pytest.mark.timeout(len(LEVELS) * SECONDS)
def test_tensor_parallelism_is_raised_until_an_engine_fills_a_node(train):
    """The error names the first level that fails; the head has no GPU."""
    for size in LEVELS:
        run = train("separate", (0, 8, 8), STEPS, SECONDS, *engines(1, size), *NO_CRITIC, heads=8, **DEVICE)
        try:
            assert_trained(run, steps=STEPS, backend="gloo", engines=1)
            assert_all_ranks_answered(run, 1, size)
        except AssertionError as error:
            raise AssertionError(f"TP {size} is the first level that fails: {error}") from error


@pytest.mark.timeout(SECONDS + 40)
@pytest.mark.parametrize(
    ("gpus", "count", "size", "ranks"),
    [
        pytest.param((2, 2), 1, 2, (1, 1), id="2x2"),
        pytest.param((0, 5, 4), 3, 2, (1, 2), id="5 and 4, all in use"),
        pytest.param((8, 8, 8, 8), 2, 4, (2, 1), id="4x8"),
    ],
)
def test_engines_next_to_the_trainer_are_node_local(train, gpus, count, size, ranks):
    run = train(
        "separate", gpus, STEPS, SECONDS, *actor(*ranks), *engines(count, size), *NO_CRITIC, heads=8, **DEVICE
    )
    assert_trained(run, steps=STEPS, backend="gloo", engines=count)
    assert_all_ranks_answered(run, count, size)
    assert nodes_of_trainers(run)["actor"] == [ranks[1]] * ranks[0]


@pytest.mark.timeout(SECONDS + 40)
def test_groups_with_their_own_gpus_leave_room_for_whole_engines(train):
    """3x6, all in use: upstream gives each group the emptiest nodes, and an engine of 4 GPUs straddles."""
    run = train("apart", (6, 6, 6), STEPS, SECONDS, *actor(1, 2), *engines(3, 4), heads=8, **DEVICE)
    assert_trained(run, steps=STEPS, backend="gloo", engines=3)
    assert_all_ranks_answered(run, 3, 4)
    assert_critic_trained(run)
    assert {name: nodes for name, nodes in nodes_of_trainers(run).items() if name != "engines"} == {
        "actor": [2],
        "ref": [2],
        "critic": [1],
        "reward": [1],
    }


@pytest.mark.timeout(SECONDS)
def test_the_replaced_device_gives_each_token_the_probability_that_the_trainer_computes(tmp_path):
    done = subprocess.run(
        [sys.executable, str(replacing.REPLACED / "probabilities_of_vllm_0_4.py"), str(tmp_path), "4"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | DEVICE,
        timeout=SECONDS - 20,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for size, found in json.loads((tmp_path / "probabilities.json").read_text()).items():
        assert len(found["engine"]) == len(found["trainer"]) == 3 * 32
        assert len(set(found["engine"])) > 48, "the tokens differ"
        differences = [a - b for a, b in zip(found["engine"], found["trainer"], strict=True)]
        assert max(map(abs, differences)) < 0.1, f"TP {size}"
        assert abs(sum(differences)) / len(differences) < 0.01, f"TP {size}"
