"""An engine whose process is killed while it generates is restarted, and the run continues to its end."""

from pathlib import Path

import dying_engine
import pytest
import replacing
from driver import HOOK
from rlhf_stack.config import env_vars
from trained import SECTIONS, assert_one_policy

pytestmark = pytest.mark.integration

SECONDS = 400
STEPS = 3
PROMPTS, SAMPLES = 8, 8  # of a step; each prompt is one request with all of its samples
LAYOUT = (
    *("--actor.num_nodes", "1", "--actor.num_gpus_per_node", "1"),
    *("--vllm.tensor_parallel_size", "1"),
    *("--data.max_len", "240", "--rollout.max_new_tokens", "200"),  # long enough to be hit
)


def dying(process):
    return {
        **replacing.path(Path(__file__).parent),
        "RAY_prestart_worker_first_driver": "0",  # a worker that Ray starts ahead lacks the hook
        "RAY_enable_worker_prestart": "0",
        HOOK: "dying_engine.install",
        dying_engine.ENGINE: "0",
        dying_engine.PROCESS: process,
        dying_engine.STEP: "2",
        env_vars.ENGINE_RESTARTS: "1",
        env_vars.REPEATABLE: "1",
    }


def learned(run):
    names = "reward", "policy_loss", "actor_grad_norm"
    return [[event[name] for name in names] for event in run.of("step")]


@SECTIONS
@pytest.mark.timeout(2 * SECONDS + 40)
@pytest.mark.parametrize(
    ("process", "engines"),
    [("actor", 2), ("core", 1)],
    ids=["one of two engines", "vLLM's process of the only one"],
)
def test_a_run_continues_when_an_engine_is_killed_while_it_generates(train, process, engines):
    count = "--vllm.num_engines", str(engines)
    run = train("separate", (1, engines), STEPS, SECONDS, *LAYOUT, *count, **dying(process))
    assert run.code == 0, run.log
    assert [event["step"] for event in run.of("step")] == list(range(1, STEPS + 1))
    assert all(event["equal"] for event in run.of("verify"))
    assert len(run.of("verify")) == STEPS + (engines == 1)  # the only engine needs the weights at once
    assert_one_policy(run)
    assert run.left_over == []
    (restart,), (restored,), (moved,) = (
        run.of(event) for event in ("engine restart", "engine restored", "prompts moved")
    )
    assert (restart["engine"], restart["restarts"], restored["engine"]) == (0, 1, 0)
    assert restored["seconds"] > 0
    assert 1 <= moved["prompts"] <= PROMPTS
    assert [event["rollout/num_samples"] for event in run.of("step")] == [PROMPTS * SAMPLES] * STEPS
    repeatable = {env_vars.REPEATABLE: "1"}
    undisturbed = train("separate", (1, engines), STEPS, SECONDS, *LAYOUT, *count, **repeatable)
    assert learned(run) == learned(undisturbed), "the run is not the same"


@SECTIONS
@pytest.mark.timeout(SECONDS + 40)
def test_without_restarts_the_error_names_the_killed_engine(train):
    run = train(
        "separate", (1, 1), STEPS, SECONDS, *LAYOUT, **(dying("actor") | {env_vars.ENGINE_RESTARTS: "0"})
    )
    assert run.code != 0
    assert "PeerError: engine 0 on node " in run.log
    assert run.of("engine restart") == []
