"""An engine whose process or node is lost: the run continues, and it is the run that nobody disturbed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import dying_engine
import pytest
from driver import HOOK
from rlhf_stack.config import env_vars
from trained import SECTIONS, assert_one_policy, weights

pytestmark = pytest.mark.integration

ABANDONED = Path(__file__).with_name("abandoned_call.py")
SECONDS = 500
STEPS = 3
PROMPTS, SAMPLES = 8, 8  # of a step; each prompt is one request with all of its samples
LAYOUT = (
    *("--actor.num_nodes", "1", "--actor.num_gpus_per_node", "1"),
    *("--vllm.tensor_parallel_size", "1"),
    *("--data.max_len", "240", "--rollout.max_new_tokens", "200"),  # long enough to be hit
)
ASYNC = ("--train.async_enable",)
ZERO3 = ("--actor.num_gpus_per_node", "2", "--ds.zero_stage", "3")
TP2 = ("--vllm.tensor_parallel_size", "2")
HYBRID = (
    *("--actor.num_nodes", "1", "--actor.num_gpus_per_node", "2"),
    *("--vllm.num_engines", "2", "--vllm.tensor_parallel_size", "1"),
)


def dying(process, phase="generation"):
    return {
        "RAY_prestart_worker_first_driver": "0",  # a worker that Ray starts ahead lacks the hook
        "RAY_enable_worker_prestart": "0",
        HOOK: "dying_engine.install",
        dying_engine.ENGINE: "0",
        dying_engine.PROCESS: process,
        dying_engine.PHASE: phase,
        dying_engine.STEP: "2",
        env_vars.ENGINE_RESTARTS: "1",
        env_vars.REPEATABLE: "1",
        env_vars.SYNC_TIMEOUT: "30",
    }


def engines(count):
    return "--vllm.num_engines", str(count)


def changed(layout, count, more):
    return HYBRID if layout == "hybrid" else (*LAYOUT, *engines(count), *more)


def learned(run):
    """Return reward, loss and gradient norm of each step, and the digests of the final weights."""
    names = "reward", "policy_loss", "actor_grad_norm"
    return [[event[name] for name in names] for event in run.of("step")], weights(run.trained)


def divergence(run):
    """Return for each step how far the engines' probabilities were from the trainer's."""
    return [event["vllm_kl"] for event in run.of("step")]


UNDISTURBED = {}  # what was learned, and the divergence, by layout


def undisturbed(train, layout, more=()):
    if (layout, more) not in UNDISTURBED:
        gpus = (3,) if more in (ZERO3, TP2) else (2,)
        run = train(layout, gpus, STEPS, SECONDS, *changed(layout, 1, more), **{env_vars.REPEATABLE: "1"})
        assert run.code == 0, run.log
        UNDISTURBED[layout, more] = learned(run), divergence(run)
    return UNDISTURBED[layout, more]


def assert_same(run, undisturbed):
    """The divergence shows whether an engine had other weights, or only sampled other tokens."""
    expected, usual = undisturbed
    assert learned(run) == expected, f"the run is not the same; vllm_kl: {divergence(run)} instead of {usual}"


def assert_continued(run, is_async=False):
    assert run.code == 0, run.log
    assert [event["step"] for event in run.of("step")] == list(range(1, STEPS + 1))
    assert all(event["equal"] for event in run.of("verify"))
    if not is_async:  # there a batch has the weights of the step before
        assert_one_policy(run)
    assert run.left_over == []
    assert [event["rollout/num_samples"] for event in run.of("step")] == [PROMPTS * SAMPLES] * STEPS


@SECTIONS
@pytest.mark.timeout(2 * SECONDS + 40)
@pytest.mark.parametrize(
    ("layout", "gpus", "count", "more", "process", "phase"),
    [
        ("separate", (1, 2), 2, (), "actor", "generation"),
        ("separate", (1, 1), 1, (), "core", "generation"),
        ("separate", (1, 1, 1, 1), 2, (), "node", "generation"),
        ("separate", (1, 2), 2, (), "core", "sync"),
        ("separate", (2, 2), 2, ZERO3, "core", "sync"),
        ("separate", (1, 4), 2, TP2, "core", "sync"),
        ("separate", (1, 2), 2, (), "actor", "start"),
        ("separate", (1, 1, 1, 1), 2, (), "node", "start"),
        ("separate", (1, 2), 2, (), "core", "join"),
        ("separate", (1, 2), 2, ASYNC, "actor", "generation"),
        ("hybrid", (2,), 2, (), "core", "sleep"),
        ("hybrid", (2,), 2, (), "stopped", "sleep"),
    ],
    ids=[
        "one of two",
        "vLLM's process of the only one",
        "a node, and another one has room",
        "in a sync",
        "in a sync with ZeRO-3",
        "in a sync of engines with two workers",
        "while it starts",
        "its node while it starts, and another one has room",
        "while it joins the first weight-sync group",
        "in asynchronous training",
        "while it sleeps on the trainer's GPUs",
        "while it sleeps there, and its processes are stopped",
    ],
)
def test_a_run_continues_with_an_engine_that_was_lost(train, layout, gpus, count, more, process, phase):
    variables = dying(process, phase)
    if more == TP2:  # several buckets, so that both workers of the other engine wait for the lost one
        variables |= {env_vars.SYNC_BUCKET: "0.03"}
    run = train(layout, gpus, STEPS, SECONDS, *changed(layout, count, more), **variables)
    assert_continued(run, is_async=more == ASYNC)
    (restart,), (restored,) = run.of("engine restart"), run.of("engine restored")
    assert (restart["engine"], restart["restarts"], restored["engine"]) == (0, 1, 0)
    assert restored["seconds"] > 0
    assert len(run.of("sync repeated")) == (phase == "sync")
    assert len(run.of("recovered")) == (phase != "start")
    if phase == "generation":
        (moved,) = run.of("prompts moved")
        assert 1 <= moved["prompts"] <= PROMPTS
    assert_same(run, undisturbed(train, layout, more))


@SECTIONS
@pytest.mark.timeout(2 * SECONDS + 40)
def test_an_engine_whose_node_is_lost_twice_moves_twice(train):
    twice = {dying_engine.TIMES: "2", env_vars.ENGINE_RESTARTS: "2"}
    run = train("separate", (1,) * 5, STEPS, SECONDS, *LAYOUT, *engines(2), **(dying("node") | twice))
    assert_continued(run)
    assert [(event["engine"], event["restarts"]) for event in run.of("engine restart")] == [(0, 1), (0, 2)]
    assert [event["back"] for event in run.of("recovered")] == [[0], [0]]
    assert_same(run, undisturbed(train, "separate"))


@SECTIONS
@pytest.mark.timeout(SECONDS + 40)
def test_the_only_engine_generates_again_after_a_recovery_on_the_trainers_gpu(train):
    """The sync of the recovery wakes up its weights alone."""
    run = train("hybrid", (1,), STEPS, SECONDS, *LAYOUT, *engines(1), **dying("core"))
    assert_continued(run)
    assert len(run.of("recovered")) == len(run.of("prompts moved")) == 1


@SECTIONS
@pytest.mark.timeout(2 * SECONDS + 40)
@pytest.mark.parametrize(("phase", "begin"), [("generation", [0, 1]), ("start", [1])])
def test_a_run_continues_without_an_engine_whose_node_is_gone(train, phase, begin):
    run = train("separate", (1, 1, 1), STEPS, SECONDS, *LAYOUT, *engines(2), **dying("node", phase))
    assert_continued(run)
    assert [event["engine"] for event in run.of("engine")] == begin
    assert [(event["lost"], event["back"]) for event in run.of("recovered")] == [([0], [])]
    assert run.of("engine restart") == []
    assert_same(run, undisturbed(train, "separate"))


@SECTIONS
@pytest.mark.timeout(2 * SECONDS + 40)
def test_a_run_continues_when_connections_to_its_actors_break(train):
    failures = {"num_failures": 2, "req_failure_prob": 20, "resp_failure_prob": 20}
    variables = {
        "RAY_testing_rpc_failure": json.dumps({"CoreWorkerService.grpc_client.PushTask": failures}),
        env_vars.ENGINE_RESTARTS: "1",
        env_vars.REPEATABLE: "1",
        env_vars.SYNC_TIMEOUT: "30",
    }
    run = train("separate", (1, 2), STEPS, SECONDS, *LAYOUT, *engines(2), **variables)
    assert_continued(run)
    assert run.of("engine restart") == []
    assert_same(run, undisturbed(train, "separate"))


@SECTIONS
def test_a_restarted_engine_does_not_fall_asleep_by_a_call_to_its_former_process(tmp_path):
    file = tmp_path / "calls"
    variables = os.environ | {env_vars.ENGINE_RESTARTS: "1"}
    subprocess.run([sys.executable, str(ABANDONED), str(file)], env=variables, check=True, timeout=SECONDS)
    calls = [line.split() for line in file.read_text().splitlines()]
    first = calls[0][0]
    assert [method for process, method in calls if process == first] == ["wake_up", "sleep"]
    assert {method for process, method in calls if process != first} == {"wake_up"}


@SECTIONS
@pytest.mark.timeout(SECONDS + 40)
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({env_vars.ENGINE_RESTARTS: "0"}, "PeerError: engine 0 on node "),
        (
            {dying_engine.PROCESS: "node", env_vars.MIN_ENGINES: "2"},
            r"engine 0 cannot be restarted: its node .* is gone, and no other has room; "
            "1 engines are left, and RLHF_STACK_MIN_ENGINES is 2",
        ),
    ],
    ids=["no restarts", "too few engines are left"],
)
def test_the_error_names_the_lost_engine(train, changes, expected):
    run = train("separate", (1, 1, 1), STEPS, SECONDS, *LAYOUT, *engines(2), **(dying("actor") | changes))
    assert run.code != 0
    assert re.search(expected, run.log), run.log
    assert run.of("engine restart") == []
