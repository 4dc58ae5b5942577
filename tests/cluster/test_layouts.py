"""Realistic cluster layouts: the real trainer takes a step, and every engine loads its weights."""

import pytest
from trained import (
    CPU_ENGINE,
    FLAT,
    SECTIONS,
    assert_critic_trained,
    assert_one_policy,
    assert_trained,
    nodes_of_trainers,
)

pytestmark = pytest.mark.integration

SECONDS = 900
TP_SIZES = (1, 2, 4, 8)
LITTLE_CACHE = {"VLLM_CPU_KVCACHE_SPACE": None}  # unset: it takes whole GB only, for each of up to 16 workers
# Small enough that each rank has one.
MICRO_BATCHES = "--train.micro_batch_size", "4", "--rollout.micro_batch_size", "4"


def engines(count, size):
    cache = "--vllm.gpu_memory_utilization", "0.04"  # of the memory, half of which the process itself needs
    return "--vllm.num_engines", str(count), "--vllm.tensor_parallel_size", str(size), *cache


def actor(nodes, gpus):
    return "--actor.num_nodes", str(nodes), "--actor.num_gpus_per_node", str(gpus), *MICRO_BATCHES


@SECTIONS
@pytest.mark.timeout(len(TP_SIZES) * SECONDS)
def test_each_tensor_parallel_size_up_to_a_whole_node(train):
    """The error names the first size that fails; the head has no GPU."""
    for size in TP_SIZES:
        run = train("separate", (0, 8, 8), 1, SECONDS, *engines(1, size), heads=8, **LITTLE_CACHE)
        try:
            assert_trained(run, steps=1, backend="gloo", engines=1)
            assert_one_policy(run)
        except AssertionError as error:
            raise AssertionError(f"TP {size} is the first size that fails: {error}") from error
        (engine,) = run.of("engine")
        assert [rank["rank"] for rank in engine["ranks"]] == list(range(size))
        assert len({rank["gpu"] for rank in engine["ranks"]}) == size


@SECTIONS
@pytest.mark.timeout(SECONDS + 40)
@pytest.mark.parametrize(
    ("gpus", "count", "size", "ranks"),
    [
        pytest.param((6, 6, 6), 3, 4, (1, 2), id="3x6, engines of 4 that upstream spreads over nodes"),
        pytest.param((5, 4), 3, 2, (1, 2), id="5 and 4"),
        pytest.param((8, 8, 8, 8), 3, 4, (1, 4), id="4x8"),
    ],
)
def test_separate_engines_are_node_local(train, gpus, count, size, ranks):
    arguments = *actor(*ranks), *engines(count, size)
    run = train("separate", gpus, 1, SECONDS, *arguments, heads=8, **LITTLE_CACHE)
    assert_trained(run, steps=1, backend="gloo", engines=count)
    assert_one_policy(run)
    assert nodes_of_trainers(run)["actor"] == [ranks[1]] * ranks[0]


@SECTIONS
@pytest.mark.timeout(SECONDS + 40)
@pytest.mark.parametrize(
    ("gpus", "count", "size"),
    [pytest.param((2, 2), 2, 2, id="2x2"), pytest.param((0, 4, 4), 2, 4, id="a head without a GPU")],
)
def test_colocated_engines_are_node_local(train, gpus, count, size):
    ranks = sum(gpus) // count
    arguments = *actor(count, ranks), *engines(count, size)
    run = train("hybrid", gpus, 1, SECONDS, *arguments, heads=8, **LITTLE_CACHE)
    assert_trained(run, steps=1, backend="ipc", engines=count)
    assert_one_policy(run)
    assert nodes_of_trainers(run)["actor"] == [ranks] * count


@FLAT
@CPU_ENGINE
@pytest.mark.timeout(SECONDS + 40)
@pytest.mark.parametrize(
    ("gpus", "count"), [((2, 2), 2), ((0, 2, 4), 4), ((0, 8, 8), 6)], ids=["2x2", "uneven", "2x8"]
)
def test_single_gpu_engines_with_actor_and_critic(train, gpus, count):
    run = train("separate", gpus, 2, SECONDS, "--vllm_num_engines", str(count))
    assert_trained(run, steps=2, backend="gloo", engines=count)
    assert_critic_trained(run)
