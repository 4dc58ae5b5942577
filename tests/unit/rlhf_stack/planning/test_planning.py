"""rlhf_stack.planning: the placement of a run, its memory, its problems and their remedies."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rlhf_stack.cli.commands import plan as plan_command
from rlhf_stack.compat import attention_provider
from rlhf_stack.config import env_vars
from rlhf_stack.errors import UserError
from rlhf_stack.memory import Zero, parse_shape
from rlhf_stack.openrlhf.run_spec import Role, Run, run_of
from rlhf_stack.placement import FreeNode
from rlhf_stack.placement.model import ENGINES, Engines, Group, Request
from rlhf_stack.planning import Machine, advice, advise, assess, cluster_spec, display, uniform_machines
from rlhf_stack.planning.advice import symmetric_layout
from rlhf_stack.planning.assessment import SPARE
from rlhf_stack.planning.cluster_spec import GIB
from rlhf_stack.planning.display import as_json, print_assessment
from rlhf_stack.planning.memory_needs import CONTEXT, need
from rlhf_stack.planning.tuning import ALLOCATOR, FLASH, apply_settings, tune
from rlhf_stack.planning.upstream_placement import upstream_layout

from tests.unit.openrlhf_arguments import sections

QWEN_7B = parse_shape("layers:28,hidden:3584,intermediate:18944,heads:28,kv_heads:4,vocabulary:152064")
SMALL = parse_shape("layers:24,hidden:896,intermediate:4864,heads:14,kv_heads:2,vocabulary:151936,tied:1")
SHAPES = {"big": QWEN_7B, "small": SMALL}
MODELS = [f"{role}-model" for role in ("actor", "ref", "critic", "reward")]  # of `sections`
CLUSTER = uniform_machines(2, 8, 80, 64, 500)
LARGE = uniform_machines(2, 8, 80, 64, 2000)  # host memory
NODE = uniform_machines(1, 8, 80, 64, 2000)


def run(model: str = "small", actor: int = 8, engines: Engines | None = None, **changes: Any) -> Run:
    """An actor with its reference, and engines."""
    groups = (Group("actor", 1, actor),)
    request = Request(groups, engines or Engines(2, 2), 1, 1)
    shares = request.engines is not None and request.engines.shares
    planned = Run(
        release="0.11.2",
        roles=(
            Role("actor", "actor", actor, model, trained=True, value_head=False),
            Role("ref", "actor", actor, model, trained=False, value_head=False),
        ),
        request=request,
        order=("actor",) if shares else ("actor", ENGINES),
        zero=Zero(2, 1),
        length=2048,
        train_batch=1,
        rollout_batch=1,
        checkpointing=True,
        attention="sdpa",
        engine_model=model,
        utilization=0.9,
    )
    return replace(planned, **changes)


def test_every_rank_and_every_worker_has_a_gpu_of_its_node() -> None:
    found = assess(run(), CLUSTER, SHAPES)
    assert not found.problems
    holds = [[gpu.holds for gpu in node.gpus] for node in found.nodes]
    assert holds[0] == [["engine 0"], ["engine 0"], ["engine 1"], ["engine 1"], [], [], [], []]
    assert holds[1] == [[f"actor {rank}", f"ref {rank}"] for rank in range(8)]
    assert found.gpus_needed == 12


def test_engines_that_share_gpus_are_on_those_of_their_group() -> None:
    planned = run(
        "big", engines=Engines(2, 4, "actor"), utilization=0.3, engine_sleeps=True, trainer_sleeps=True
    )
    found = assess(planned, NODE, SHAPES)
    assert found.gpus_needed == 8
    assert [gpu.holds[-1] for gpu in found.nodes[0].gpus] == ["engine 0"] * 4 + ["engine 1"] * 4
    assert not found.problems


def test_awake_engines_next_to_the_trainer_take_their_share_of_a_gpu() -> None:
    planned = run(engines=Engines(2, 4, "actor"), utilization=0.5)
    awake = assess(planned, uniform_machines(1, 8, 80, 64, 500), SHAPES).nodes[0].gpus[0]
    asleep = (
        assess(replace(planned, engine_sleeps=True), uniform_machines(1, 8, 80, 64, 500), SHAPES)
        .nodes[0]
        .gpus[0]
    )
    assert awake.training - asleep.training == 40 * GIB
    assert awake.generating == asleep.generating > 40 * GIB


def test_a_sync_needs_memory_next_to_the_engines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedding of 152,064 x 3,584 in 16 bits and two buckets: more than utilization 0.99 leaves free.

    And a copy of a bucket, and twice the shard of the embedding, of two GPUs, to reload it.
    """
    planned = run("big", utilization=0.99)
    monkeypatch.setenv(env_vars.SYNC_BUCKET, "32")
    found = assess(planned, LARGE, SHAPES)
    gpu = found.nodes[0].gpus[0]
    assert gpu.holds == ["engine 0"]
    assert gpu.syncing - gpu.generating == 1_089_994_752 + 64_000_000 + 32_000_000 + 1_089_994_752
    assert any("while receiving weights (engine)" in problem for problem in found.problems)
    assert not assess(replace(planned, utilization=0.95), LARGE, SHAPES).problems


def test_engines_alone_that_leave_too_little_for_a_sync_are_advised_to_use_less() -> None:
    planned = run("big", utilization=0.99)
    found = assess(planned, LARGE, SHAPES)
    assert [one.flags for one in advise(found, LARGE, SHAPES)] == [("--vllm.gpu_memory_utilization 0.94",)]
    flat, alone = replace(planned, release="0.5.1"), replace(planned.request, engines=None)
    for without in (flat, replace(planned, request=alone)):
        assert not [flags for flags, _, _ in advice._changes(without) if "utilization" in flags[0]]


def test_a_sync_of_engines_that_sleep_needs_no_kv_cache() -> None:
    """It wakes up their weights alone."""
    planned = run("big", engines=Engines(2, 4, "actor"), utilization=0.5)
    awake, asleep = (assess(replace(planned, engine_sleeps=sleeps), NODE, SHAPES) for sleeps in (False, True))
    assert asleep.engine is not None
    saved = awake.nodes[0].gpus[0].syncing - asleep.nodes[0].gpus[0].syncing
    assert saved == asleep.engine.cache > 20 * GIB


def test_nodes_of_engines_and_the_sender_keep_the_weights_that_changes_apply_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three nodes, of which one has engines, one the actor, and one nothing."""
    monkeypatch.delenv(env_vars.SYNC_SPARSE, raising=False)
    machines = uniform_machines(3, 8, 80, 64, 500)
    before = [node.memory_running for node in assess(run("big"), machines, SHAPES).nodes]
    monkeypatch.setenv(env_vars.SYNC_SPARSE, "on")
    after = [node.memory_running for node in assess(run("big"), machines, SHAPES).nodes]
    added = [more - less for more, less in zip(after, before, strict=True)]
    assert sorted(added) == [0, 2 * QWEN_7B.total, 2 * QWEN_7B.total]


@pytest.mark.parametrize(
    ("release", "sources", "shares"),
    [
        ("0.11.2", "auto", [0, 1 / 2, 1 / 2, 1]),
        ("0.11.2", "1", [0, 0, 1, 1]),
        ("0.11.2", "3", [0, 1 / 3, 2 / 3, 1]),
        ("0.5.1", "auto", [0, 0, 1, 1]),
    ],
    ids=["one a node", "rank 0", "three on two nodes", "a release with one sender"],
)
def test_each_node_of_senders_keeps_its_share(
    monkeypatch: pytest.MonkeyPatch, release: str, sources: str, shares: list[float]
) -> None:
    """Of four nodes one has engines, two the actor, and one nothing; ``shares`` are parts of the weights."""
    monkeypatch.delenv(env_vars.SYNC_SPARSE, raising=False)
    monkeypatch.setenv(env_vars.SYNC_SOURCES, sources)
    machines = uniform_machines(4, 8, 80, 64, 500)
    planned = run("big", 16, release=release)
    before = [node.memory_running for node in assess(planned, machines, SHAPES).nodes]
    monkeypatch.setenv(env_vars.SYNC_SPARSE, "on")
    after = [node.memory_running for node in assess(planned, machines, SHAPES).nodes]
    added = [more - less for more, less in zip(after, before, strict=True)]
    assert sorted(added) == pytest.approx([share * 2 * QWEN_7B.total for share in shares])


def test_a_sleeping_trainer_moves_its_optimiser_to_the_host() -> None:
    planned = run("big", engines=Engines(2, 4, "actor"), engine_sleeps=True)
    awake = assess(planned, uniform_machines(1, 8, 80, 64, 500), SHAPES)
    asleep = assess(replace(planned, trainer_sleeps=True), uniform_machines(1, 8, 80, 64, 500), SHAPES)
    moved = awake.needs["actor"].optimizer + awake.needs["actor"].gradients
    assert awake.nodes[0].gpus[0].generating - asleep.nodes[0].gpus[0].generating == moved
    assert asleep.nodes[0].memory_running - awake.nodes[0].memory_running == 8 * moved


def test_trainer_and_engine_on_a_gpu_have_a_process_each_and_leave_a_part_free() -> None:
    """vLLM takes its share of a GPU next to its context; an engine alone has room for that."""
    both = run("big", engines=Engines(8, 1, "actor"), utilization=0.5, engine_sleeps=True)
    found = assess(both, NODE, SHAPES)
    gpu, roles = found.nodes[0].gpus[0], found.needs.values()
    kept = 40 * GIB + sum(role.asleep for role in roles)
    assert gpu.generating == kept + 3 * CONTEXT + int(SPARE * 80 * GIB)
    separate = assess(run("big", engines=Engines(8, 1), utilization=0.5), LARGE, SHAPES)
    engine, trainer = (node.gpus[0] for node in separate.nodes)
    assert engine.holds == ["engine 0"]
    assert engine.generating == 40 * GIB
    assert trainer.generating == kept - 40 * GIB + 2 * CONTEXT
    limit = replace(both, utilization=0.99 - (gpu.generating - 40 * GIB) / (80 * GIB))
    assert not assess(limit, NODE, SHAPES).problems
    more = replace(limit, utilization=limit.utilization + 0.02)
    assert any("while generating" in problem for problem in assess(more, NODE, SHAPES).problems)


LLAMA_8B = parse_shape("layers:32,hidden:4096,intermediate:14336,heads:32,kv_heads:8,vocabulary:128256")


def test_tuning_does_not_aim_at_the_limit() -> None:
    """It chose 0.6, for 79.2 of 79.6 GiB without the engine's own process, where CUDA offers 79.18."""
    planned = run("llama", engines=Engines(8, 1, "actor"), length=4096)
    machines, shapes = uniform_machines(1, 8, 79.6, 96, 2000), {"llama": LLAMA_8B}
    tuned = tune(planned, machines, shapes)
    assert (tuned.run.utilization, tuned.run.zero.stage) == (0.55, 2)
    found = assess(replace(tuned.run, utilization=0.6), machines, shapes)
    assert round(found.nodes[0].gpus[0].generating / GIB, 1) == 83.1


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, 1),
        ({"trainer_sleeps": True}, 0),
        ({"trainer_sleeps": True, "zero": Zero(3, 1, offload=True)}, 1),
        ({"zero": Zero(2, 1)}, 0),
    ],
    ids=str,
)
def test_a_role_that_does_not_move_its_state_keeps_the_bucket_of_stage_3(
    changes: dict[str, Any], kept: int
) -> None:
    """DeepSpeed allocates 500,000,000 elements of 16 bits with the optimiser, once."""
    planned = run("big", **({"zero": Zero(3, 1)} | changes))
    actor, ref = (need(planned, role, QWEN_7B) for role in planned.roles)
    moved = actor.gradients + actor.optimizer if planned.trainer_sleeps and not planned.zero.offload else 0
    assert actor.asleep == actor.held - moved + kept * 1_000_000_000
    assert ref.asleep == ref.weights


@pytest.mark.parametrize(
    ("stage", "on_gpu", "on_host"), [(2, 2 * QWEN_7B.total, 4 * QWEN_7B.total), (3, 0, 6 * QWEN_7B.total / 8)]
)
def test_a_moving_average_is_kept_in_32_bits_on_the_host(stage: int, on_gpu: int, on_host: float) -> None:
    """OpenRLHF has a second model, in 16 bits: on the GPU, or on the host as shards at stage 3."""
    planned = run("big", zero=Zero(stage, 1))
    actor, ref = (
        [need(replace(planned, ema=ema), role, QWEN_7B) for ema in (False, True)] for role in planned.roles
    )
    assert actor[1].weights - actor[0].weights == on_gpu
    assert actor[1].host - actor[0].host == pytest.approx(on_host)
    assert ref[0] == ref[1]


@pytest.mark.parametrize("sleeps", [False, True])
def test_actor_and_critic_train_at_once_or_hold_their_states_in_turn(sleeps: bool) -> None:
    """OpenRLHF starts both trainings at once, but with --ds.enable_sleep one after the other."""
    asked = {"ds__adam_offload": False, "ds__enable_sleep": sleeps, "vllm__enable_sleep": True}
    planned = run_of("0.11.2", sections(train__colocate_all=True, **asked))
    found = assess(planned, NODE, dict.fromkeys(MODELS, SMALL))
    actor, ref, critic, reward = (found.needs[name] for name in ("actor", "ref", "critic", "reward"))
    processes = 5 * CONTEXT + int(SPARE * 80 * GIB) + ref.weights + reward.weights
    whole = [role.held + role.working for role in (actor, critic)]
    in_turn = max(whole[0] + critic.weights, whole[1] + actor.weights)
    assert found.nodes[0].gpus[0].training == processes + (in_turn if sleeps else sum(whole))


def test_a_trainer_whose_optimiser_is_on_the_host_moves_nothing_there_to_sleep() -> None:
    """OpenRLHF then leaves its gradients on the GPU, which ZeRO-2 has there."""
    planned = run("big", engines=Engines(2, 4, "actor"), engine_sleeps=True, zero=Zero(2, 1, offload=True))
    awake, asleep = (
        assess(replace(planned, trainer_sleeps=sleeps), NODE, SHAPES) for sleeps in (False, True)
    )
    assert awake.needs == asleep.needs


def test_what_cannot_be_placed_is_a_problem_with_the_planners_reason() -> None:
    found = assess(run(), uniform_machines(1, 8, 80, 64, 500), SHAPES)
    assert found.ours is None
    assert "12 GPUs are requested and 8 are free" in found.problems[0]
    assert all(not gpu.holds for gpu in found.nodes[0].gpus)


def test_too_little_memory_names_the_gpus_the_roles_and_the_phase() -> None:
    found = assess(run("big"), uniform_machines(2, 8, 40, 64, 500), SHAPES)
    assert any("of a GPU's 40.0 while training (actor, ref)" in problem for problem in found.problems)


@pytest.mark.parametrize(
    ("release", "length", "refused"),
    [("0.11.2", 400_000, False), ("0.11.2", 600_000, True), ("0.5.1", 400_000, True)],
)
def test_a_cache_without_room_for_one_sequence_is_a_problem(release: str, length: int, refused: bool) -> None:
    """A step of vLLM 0.4 has all tokens of a prompt, one of vLLM 0.29 no more for a longer prompt."""
    machines = uniform_machines(2, 8, 24, 64, 0)
    found = assess(run("big", length=length, release=release), machines, SHAPES)
    assert any("has room for" in one and str(length) in one for one in found.problems) == refused


def test_heads_that_do_not_divide_are_a_problem() -> None:
    found = assess(run(engines=Engines(1, 4)), CLUSTER, SHAPES)
    assert found.problems == ("vLLM cannot split 14 heads over 4 GPUs: use a size that divides them",)


@pytest.mark.parametrize(
    ("kv_heads", "latent", "size", "refused"),
    [
        (6, 0, 4, True),
        (6, 0, 12, False),
        (6, 0, 3, False),
        (4, 0, 6, True),
        (4, 0, 8, False),
        (6, 576, 4, False),
    ],
)
def test_heads_that_vllm_can_neither_split_nor_repeat_are_a_problem(
    kv_heads: int, latent: int, size: int, refused: bool
) -> None:
    """Its engines end with an assertion; latent attention has one head for all."""
    shapes = {"small": replace(SMALL, heads=24, kv_heads=kv_heads, latent=latent)}
    problems = assess(run(engines=Engines(1, size)), uniform_machines(4, 8, 80, 64, 500), shapes).problems
    assert (
        any(f"can neither split {kv_heads} KV heads over {size} GPUs" in one for one in problems) == refused
    )


LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


@pytest.mark.parametrize(
    ("length", "release", "variables", "refused"),
    [
        (2048, "0.11.2", {}, False),
        (2049, "0.11.2", {}, True),
        (2049, "0.11.2", {LONG: "1"}, False),
        (2049, "0.11.2", {LONG: " True"}, False),
        (2049, "0.11.2", {LONG: "0"}, True),
        (2049, "0.5.1", {LONG: "1"}, True),
    ],
)
def test_a_run_that_is_longer_than_its_model_is_a_problem(
    length: int, release: str, variables: dict[str, str], refused: bool
) -> None:
    shapes = {"small": replace(SMALL, max_length=2048)}
    found = assess(run(length=length, release=release), CLUSTER, shapes, variables)
    assert any("vLLM refuses sequences of 2049 tokens: the model" in one for one in found.problems) == refused
    assert not any(LONG in one for one in found.problems if release == "0.5.1")
    alone = replace(run(length=length), request=replace(run().request, engines=None))
    assert not any("vLLM refuses" in one for one in assess(alone, CLUSTER, shapes, {}).problems)


def test_a_group_of_weights_that_does_not_divide_the_ranks_is_not_advised() -> None:
    """Of stage 3, which alone has such groups."""
    assert any(
        "multiple of 3" in one for one in assess(run(zero=Zero(3, 1, shards=3)), CLUSTER, SHAPES).problems
    )
    assert not assess(run(zero=Zero(2, 1, shards=3)), CLUSTER, SHAPES).problems


def test_the_memory_of_a_sync_follows_the_variables_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """`submit --env` gives a run other variables than this process has."""
    for name in (env_vars.SYNC_BUCKET, env_vars.SYNC_SPARSE, env_vars.SYNC_SOURCES):
        monkeypatch.delenv(name, raising=False)
    machines = uniform_machines(4, 8, 80, 64, 500)

    def memory(**variables: str) -> tuple[int, list[int]]:
        nodes = assess(run("big", 16), machines, SHAPES, variables).nodes
        syncing = max(gpu.syncing for node in nodes for gpu in node.gpus)
        return syncing, sorted(node.memory_running for node in nodes)

    plain = memory()
    assert memory(**{env_vars.SYNC_BUCKET: "132"})[0] - plain[0] == 3 * 100_000_000
    sparse = memory(**{env_vars.SYNC_SPARSE: "on"})
    one = memory(**{env_vars.SYNC_SPARSE: "on", env_vars.SYNC_SOURCES: "1"})
    assert plain[1] != sparse[1] != one[1]


def test_an_unknown_memory_is_a_note_and_not_a_verdict() -> None:
    found = assess(run("big"), uniform_machines(2, 8, 0, 64, 0), SHAPES)
    assert not found.problems
    assert found.engine is None
    assert any("--gpu-memory" in note for note in found.notes)


def test_offloading_below_stage_3_is_reported_to_have_no_effect() -> None:
    planned = run()
    offloaded = replace(planned, roles=(planned.roles[0], replace(planned.roles[1], offloaded=True)))
    assert any(
        "has no effect below" in note
        for note in assess(offloaded, uniform_machines(2, 8, 80, 0, 0), SHAPES).notes
    )


def test_the_older_generation_is_planned_too() -> None:
    planned = run(release="0.5.1", engines=Engines(3, 4), model="big", actor=2)
    found = assess(planned, uniform_machines(2, 8, 80, 64, 0), SHAPES)
    assert found.ours is not None
    assert found.ours.straddling == ()


@pytest.mark.parametrize("memory", [24, 40, 80])
@pytest.mark.parametrize("shares", [None, "actor"])
def test_what_is_advised_is_enough(memory: int, shares: str | None) -> None:
    """The run does not fit on these GPUs, and fits with the advised flags."""
    planned = run("big", engines=Engines(2, 4, shares), checkpointing=False, train_batch=4, rollout_batch=8)
    cluster = uniform_machines(2, 8, memory, 64, 2000)
    found = assess(planned, cluster, SHAPES)
    assert found.problems
    advice = advise(found, cluster, SHAPES)
    assert advice
    for one in advice:
        assert one.flags
        assert all(flag.startswith("--") for flag in one.flags)
        assert not assess(one.run, cluster, SHAPES).problems


def test_what_fits_needs_no_advice_and_what_nothing_helps_gets_none() -> None:
    assert advise(assess(run(), LARGE, SHAPES), LARGE, SHAPES) == []
    tiny = uniform_machines(2, 8, 2, 64, 2000)
    assert advise(assess(run("big"), tiny, SHAPES), tiny, SHAPES) == []


def test_a_symmetric_layout_has_the_same_on_every_node() -> None:
    """12 training GPUs and 4 for engines on two nodes: 6 + 2 on each."""
    planned = run(actor=8, engines=Engines(2, 2))
    request = replace(planned.request, groups=(Group("actor", 1, 12),))
    planned = replace(planned, request=request, batch=96)
    found = symmetric_layout(planned, CLUSTER, SHAPES)
    assert found is not None
    assert found.run.request.groups == (Group("actor", 2, 6),)
    assert found.run.request.engines == Engines(2, 2)
    assert "--actor.num_gpus_per_node 6" in found.flags
    assert "--vllm.num_engines 2" in found.flags
    placed = assess(found.run, CLUSTER, SHAPES)
    counts = [sum("engine" in name for gpu in node.gpus for name in gpu.holds) for node in placed.nodes]
    assert counts == [2, 2]


def test_a_layout_that_the_planner_would_not_keep_is_not_suggested() -> None:
    """Four training GPUs fit on one node and are placed there."""
    found = symmetric_layout(run(actor=4, engines=Engines(6, 2)), CLUSTER, SHAPES)
    assert found is None or found.run.request.groups[0].size > 8


def test_uneven_nodes_have_no_symmetric_layout() -> None:
    uneven = [*uniform_machines(1, 8, 80, 64, 0), *uniform_machines(1, 4, 80, 64, 0)]
    assert symmetric_layout(run(actor=4, engines=Engines(2, 2)), uneven, SHAPES) is None


@settings(max_examples=60)
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([None, "actor"]),
    st.integers(0, 3),
    st.sampled_from([1, 4]),
    st.sampled_from([16, 40, 80]),
    st.integers(1, 3),
)
def test_a_report_counts_every_rank_once_and_documents_its_json(
    actor: int, shares: str | None, stage: int, batch: int, memory: int, nodes: int
) -> None:
    engines = Engines(actor, 1, shares)
    planned = run("small", actor, engines, zero=Zero(stage, 1), train_batch=batch, utilization=0.4)
    cluster = uniform_machines(nodes, 8, memory, 64, 100)
    found = assess(planned, cluster, SHAPES)
    held = [name for node in found.nodes for gpu in node.gpus for name in gpu.holds]
    if found.ours:
        assert sorted(name for name in held if name.startswith("actor")) == sorted(
            f"actor {rank}" for rank in range(actor)
        )
        used = sum(bool(gpu.holds) for node in found.nodes for gpu in node.gpus)
        assert used == found.gpus_needed
    advice = advise(found, cluster, SHAPES)
    values = json.loads(
        json.dumps(as_json(found, advice, symmetric_layout(planned, cluster, SHAPES)), allow_nan=False)
    )
    assert values["fits"] == (not values["problems"])
    assert values["gpus_needed"] == planned.request.size


def keys(value: Any) -> set[str]:
    """The names of all fields in a JSON value."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return {name for one in inner for name in keys(one)} | set(value if isinstance(value, dict) else ())


def test_help_names_every_field_of_the_json() -> None:
    cluster = uniform_machines(2, 8, 40, 64, 500)
    planned = run("big", engines=Engines(2, 4))
    found = assess(planned, cluster, SHAPES)
    advice = advise(found, cluster, SHAPES)
    values = json.loads(json.dumps(as_json(found, advice, symmetric_layout(planned, cluster, SHAPES))))
    assert values["advice"]
    assert values["engine"]["cache"]
    documented = set(re.findall(r"\w+", (plan_command.__doc__ or "").partition("--json prints")[2]))
    assert keys(values) - documented == set()


def test_the_screen_has_every_gpu_and_the_verdict() -> None:
    cluster = uniform_machines(2, 8, 40, 64, 500)
    found = assess(run("big"), cluster, SHAPES)
    output = io.StringIO()
    print_assessment(Console(file=output, width=120), found, advise(found, cluster, SHAPES), None)
    printed = output.getvalue()
    assert printed.count("GPU ") >= 16
    assert "this run does not fit" in printed
    assert "try: " in printed


def test_machines_come_from_yaml(tmp_path: Path) -> None:
    file = tmp_path / "nodes.yaml"
    file.write_text(
        "nodes:\n- {count: 2, gpus: 8, gpu_memory: 80, cpus: 96, memory: 1000}\n- {gpus: 0, address: head}\n"
    )
    found = cluster_spec.read_machines(file)
    assert [machine.address for machine in found] == ["node-1", "node-2", "head"]
    assert found[0] == Machine("node-1", 8, 96.0, 80 * GIB, 1000 * GIB)
    assert found[2].gpus == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: 3", "expected a list of nodes"),
        ("[1]", "expected a list of nodes"),
        ("nodes: [{gpu: 8}]", "unknown gpu"),
        ("nodes: [{gpus: many}]", "gpus is 'many'"),
        ("nodes: [{gpus: -1}]", "gpus is '-1'"),
        ("nodes: []", "no nodes"),
        ("nodes: [", "not YAML"),
    ],
)
def test_a_wrong_file_is_explained_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "nodes.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as raised:
        cluster_spec.read_machines(file)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_machines_come_from_a_running_ray() -> None:
    table = [
        {"Alive": alive, "NodeManagerAddress": address, "Resources": resources}
        for alive, address, resources in (
            (True, "10.0.0.2", {"GPU": 8.0, "CPU": 32.0, "memory": 5.0}),
            (True, "10.0.0.1", {"CPU": 4.0, "object_store_memory": 2.0}),
            (False, "10.0.0.3", {"GPU": 8.0}),
        )
    ]
    free = [FreeNode("10.0.0.1", 0, 4, 0), FreeNode("10.0.0.2", 2, 30, 8)]
    found = cluster_spec.machines_of_nodes(table, free, 80)
    assert [machine.address for machine in found] == ["10.0.0.1", "10.0.0.2"]
    assert found[1].free == FreeNode("10.0.0.2", 2, 30, 8)
    assert (found[1].gpus, found[1].gpu_memory, found[1].memory) == (8, 80 * GIB, 5)


def test_engines_straddle_in_a_plan_as_in_the_run_if_the_user_allows_it() -> None:
    """Two of three engines of four GPUs fit on two nodes of seven."""
    machines = uniform_machines(2, 7, 192, 64, 2000)
    planned = run("big", actor=2, engines=Engines(3, 4))
    assert f"{env_vars.ALLOW_STRADDLE}=1 lets" in assess(planned, machines, SHAPES, {}).refusal
    allowed = assess(planned, machines, SHAPES, {env_vars.ALLOW_STRADDLE: "1"})
    assert allowed.problems == ()
    assert as_json(allowed, [], None)["straddling"]["ours"] == [2]


def test_tuning_fills_the_gpus_and_gives_reasons() -> None:
    tuned = tune(run("small", checkpointing=True, batch=256), LARGE, SHAPES)
    assert tuned.fits
    assert not assess(tuned.run, LARGE, SHAPES).problems
    assert not tuned.run.checkpointing
    assert tuned.run.train_batch > 1
    larger = replace(tuned.run, train_batch=2 * tuned.run.train_batch)
    assert tuned.run.train_batch == 32 or assess(larger, LARGE, SHAPES).problems
    assert all(setting.reason for setting in tuned.settings)


@pytest.mark.parametrize(
    ("release", "requested", "provider", "setting", "dropped"),
    [
        ("0.11.2", FLASH, "torch's attention", f"--ds.attn_implementation {FLASH}", False),
        ("0.11.2", FLASH, "", "--ds.attn_implementation sdpa", False),
        ("0.11.2", "eager", "torch's attention", None, False),
        ("0.5.1", "eager", "xformers 0.0.26", "--flash_attn", False),
        ("0.5.1", FLASH, "xformers 0.0.26", "--flash_attn", False),
        ("0.5.1", FLASH, "", "--flash_attn", True),
    ],
)
def test_tuning_chooses_the_attention_that_something_here_computes(
    monkeypatch: pytest.MonkeyPatch,
    release: str,
    requested: str,
    provider: str,
    setting: str | None,
    dropped: bool,
) -> None:
    """Without it the memory of a long sequence is that of eager attention, whose scores are quadratic."""
    monkeypatch.setattr(attention_provider, "provider", lambda: provider)
    tuned = tune(run(release=release, attention=requested), LARGE, SHAPES)
    found = [one for one in tuned.settings if "att" in one.text]
    assert [(one.text, one.dropped) for one in found] == ([(setting, dropped)] if setting else [])
    assert all((provider or "nothing here computes flash_attention_2") in one.reason for one in found)
    assert (tuned.run.attention == "eager") == (dropped or setting is None)


def test_tuning_gives_up_with_the_reason() -> None:
    tuned = tune(run("big"), uniform_machines(2, 8, 8, 64, 2000), SHAPES)
    assert not tuned.fits
    assert any("not enough memory" in problem for problem in tuned.problems)


def test_engines_and_trainer_on_shared_gpus_sleep_alternately() -> None:
    tuned = tune(run("big", engines=Engines(2, 4, "actor")), NODE, SHAPES)
    assert tuned.fits
    texts = [setting.text for setting in tuned.settings]
    assert "--vllm.enable_sleep" in texts
    assert not any(setting.is_variable for setting in tuned.settings)


@pytest.mark.parametrize(
    ("accelerator", "engines", "expected"),
    [
        ("cuda", Engines(4, 1), {"--vllm.sync_backend nccl", ALLOCATOR}),
        ("cuda", Engines(2, 2), {"--vllm.sync_backend nccl"}),
        ("rocm", Engines(2, 2), {"--vllm.sync_backend gloo"}),
        ("cuda", Engines(2, 4, "actor"), set()),
    ],
)
def test_the_backend_and_the_allocator_are_those_of_the_accelerator(
    monkeypatch: pytest.MonkeyPatch, accelerator: str, engines: Engines, expected: set[str]
) -> None:
    monkeypatch.setenv(env_vars.ACCELERATOR, accelerator)
    tuned = tune(run("big", engines=engines), LARGE, SHAPES)
    texts = {setting.text for setting in tuned.settings}
    assert {text for text in texts if "sync_backend" in text or text == ALLOCATOR} == expected


def test_settings_replace_those_of_the_command_line() -> None:
    tuned = tune(run("small"), LARGE, SHAPES)
    flags = ["--train.micro_batch_size", "99", "--ds.adam_offload", "--ds.zero_stage=3", "--keep", "it"]
    words = apply_settings(["python", "-m", "x", *flags], tuned)
    assert "99" not in words
    assert "--ds.adam_offload" not in words
    assert "--ds.zero_stage=3" not in words
    assert words[words.index("--train.micro_batch_size") + 1] == str(tuned.run.train_batch)
    assert words[words.index("--keep") + 1] == "it"
    assert apply_settings(words, tuned) == words


def shown(found: Any, machines: Any, shapes: Any = SHAPES) -> str:
    """The printed plan."""
    console = Console(file=io.StringIO(), width=200)
    print_assessment(console, found, advise(found, machines, shapes), None)
    output: Any = console.file
    return str(output.getvalue())


def test_the_nodes_that_an_engine_spans_are_comparable() -> None:
    """An engine over 16 GPUs on nodes of 8 spans two nodes in every placement."""
    shapes = {"big": replace(QWEN_7B, heads=32, kv_heads=8)}
    machines = uniform_machines(5, 8, 80, 64, 2000)
    planned = run("big", engines=Engines(2, 16))
    found = assess(planned, machines, shapes)
    line = next(line for line in shown(found, machines, shapes).splitlines() if "as released" in line)
    assert line.strip().endswith("placed by rlhf_stack: each of 2 engines spans 2 nodes (needs to)")
    assert as_json(found, [], None)["straddling"]["ours"] == []
    wide = display.__dict__["_spanned"](((0, 1, 2), (3, 4)), 2)
    assert wide == "1 of 2 engines spans up to 3 nodes, 2 are needed"


@pytest.mark.parametrize(
    ("nodes", "least", "shown"),
    [
        ((0, 0), 1, "the engine is on one node"),
        ((0, 1), 1, "the engine spans 2 nodes (needs 1)"),
        ((0, 1), 2, "the engine spans 2 nodes (needs to)"),
        ((0, 1, 2), 2, "the engine spans 3 nodes (needs 2)"),
    ],
)
def test_the_only_engine_is_not_one_of_1_engines(nodes: tuple[int, ...], least: int, shown: str) -> None:
    assert display.__dict__["_spanned"]((nodes,), least) == shown


def test_a_run_whose_memory_is_unknown_is_not_said_to_fit() -> None:
    machines = uniform_machines(2, 8, 0, 64, 0)
    found = assess(run(), machines, SHAPES)
    assert shown(found, machines).strip().endswith("its memory was not checked (--gpu-memory)")
    assert as_json(found, [], None)["memory_checked"] is False
    known = CLUSTER
    assert shown(assess(run(), known, SHAPES), known).strip().endswith("this run fits")


def test_advice_halves_dynamic_batches() -> None:
    machines = uniform_machines(2, 8, 40, 64, 2000)
    planned = run(tokens=131072, rollout_tokens=131072)
    texts = {
        text for one in advise(assess(planned, machines, SHAPES), machines, SHAPES) for text in one.flags
    }
    assert any(text.startswith("--train.max_tokens_per_gpu ") for text in texts), texts


def test_advice_against_too_little_host_memory_moves_less_to_the_host() -> None:
    planned = run("big", zero=Zero(2, 1, offload=True))
    machines = uniform_machines(2, 8, 141, 64, 120)
    found = assess(planned, machines, SHAPES)
    assert any("of the host" in problem for problem in found.problems)
    texts = {text for one in advise(found, machines, SHAPES) for text in one.flags}
    assert "without --ds.adam_offload" in texts


def test_an_optimiser_that_cannot_run_on_the_host_is_not_proposed() -> None:
    """In images without DeepSpeed's operator for it, for which the advice ended a run at its start."""
    machines = uniform_machines(2, 8, 32, 64, 2000)
    for can_offload in (True, False):
        planned = run("big", actor=4, zero=Zero(3, 1), can_offload=can_offload)
        found = assess(planned, machines, SHAPES)
        advised = [text for one in advise(found, machines, SHAPES) for text in one.flags]
        assert ("--ds.adam_offload" in advised) == can_offload
        tuned = tune(planned, machines, SHAPES)
        chosen = [one for one in tuned.settings if one.text == "--ds.adam_offload" and not one.dropped]
        assert bool(chosen) == can_offload
        assert tuned.fits == can_offload


@pytest.mark.parametrize("has_fused_adam", [True, False])
def test_a_trainer_that_cannot_sleep_is_not_advised_to(has_fused_adam: bool) -> None:
    """DeepSpeed moves its fused Adam alone at ZeRO stage 3, and the advice ended a run at its start."""
    engines = Engines(8, 1, shares="actor")

    def asked(stage: int, **changes: Any) -> Run:
        zero = Zero(stage, 1)
        return run("big", engines=engines, zero=zero, has_fused_adam=has_fused_adam, **changes)

    def advised(planned: Run) -> list[Run]:
        return [changed for _, _, changed in advice._changes(planned)]

    assert any(one.trainer_sleeps for one in advised(asked(2)))
    assert any(one.trainer_sleeps for one in advised(asked(3))) == has_fused_adam
    sharded = [one for one in advised(asked(2, trainer_sleeps=True)) if one.zero.stage == 3]
    assert bool(sharded) == has_fused_adam
    tuned = tune(asked(3), uniform_machines(1, 8, 141, 64, 2000), SHAPES)
    dropped = {one.text: one.dropped for one in tuned.settings}
    assert dropped["--ds.enable_sleep"] == (not has_fused_adam), tuned
    assert tuned.run.trainer_sleeps == has_fused_adam
    apart = replace(asked(3), request=replace(asked(3).request, engines=Engines(8, 1)))
    [(flags, _, _)] = advice._hybrid(apart)
    assert ("--ds.enable_sleep" in flags) == has_fused_adam


def test_advice_to_shorten_lowers_the_limit_of_the_answer_too() -> None:
    """`--data.max_len 37120` was advised next to `--rollout.max_new_tokens 64000`."""
    planned = run("big", length=74240, answer=64000)
    changes = [flags for flags, reason, _ in advice._changes(planned) if reason == "shorter sequences"]
    assert changes == [("--data.max_len 37120", "--rollout.max_new_tokens 18560")]
    flat = run("big", release="0.5.1", length=3072, answer=2048)
    changes = [flags for flags, reason, _ in advice._changes(flat) if reason == "shorter answers"]
    assert changes == [("--generate_max_len 1024",)]


def test_weights_of_4_bits_need_a_quarter_and_lora() -> None:
    full = assess(run("big", lora=8), LARGE, SHAPES)
    small = assess(run("big", lora=8, quantized=True), LARGE, SHAPES)
    assert 0.25 < small.needs["actor"].weights / full.needs["actor"].weights < 0.40  # heads stay in 16 bits
    assert not small.problems
    alone = replace(run(quantized=True), request=replace(run().request, engines=None))
    assert any("use LoRA" in problem for problem in assess(alone, LARGE, SHAPES).problems)


@pytest.mark.parametrize(("release", "flag"), [("0.11.2", "--ds.load_in_4bit"), ("0.5.1", "--load_in_4bit")])
def test_weights_of_4_bits_are_to_be_left_out_next_to_engines(release: str, flag: str) -> None:
    """LoRA was advised, with which the run is refused too: weights of 4 bits cannot be merged."""
    found = assess(run(quantized=True, release=release), LARGE, SHAPES)
    (problem,) = found.problems
    assert problem.endswith(f"leave {flag} out")
    assert [one.flags for one in advise(found, LARGE, SHAPES)] == [(f"without {flag}",)]


def apart(
    one: str = "actor", other: str = "ref", ranks: int = 8, engines: Engines | None = None, **changes: Any
) -> Run:
    """A run whose two roles have GPUs of their own."""
    trained = {"actor": True, "ref": False, "critic": True, "reward": False}
    roles = tuple(
        Role(name, name, ranks, "small", trained[name], name in ("critic", "reward")) for name in (one, other)
    )
    groups = tuple(Group(name, 1, ranks) for name in (one, other))
    request = Request(groups, engines or Engines(8, 1), 1, 1)
    planned = run(roles=roles, order=(ENGINES, one, other))
    return replace(planned, request=request, **changes)


@pytest.mark.parametrize(
    ("one", "other", "release", "flag"),
    [
        ("actor", "ref", "0.11.2", "--train.colocate_actor_ref"),
        ("actor", "ref", "0.5.1", "--colocate_actor_ref"),
        ("critic", "reward", "0.11.2", "--train.colocate_critic_reward"),
        ("critic", "reward", "0.5.1", "--colocate_critic_reward"),
    ],
)
def test_roles_share_gpus_where_there_are_too_few(one: str, other: str, release: str, flag: str) -> None:
    """24 GPUs are requested and 16 are free: nothing was advised."""
    found = assess(apart(one, other, release=release), LARGE, SHAPES)
    assert "24 GPUs are requested" in found.refusal
    advised = advise(found, LARGE, SHAPES)
    assert [change.flags[0] for change in advised] in ([flag], [flag, "--train.colocate_all"])
    changed = advised[0].run
    assert {role.group for role in changed.roles} == {one}
    assert [(group.size, group.strict_spread) for group in changed.request.groups] == [(8, changed.flat)]
    assert set(changed.order) == {one, ENGINES}
    assert (changed.order[0] == one) == (one == "actor" and not changed.flat)  # as OpenRLHF creates them


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--a 1", "--b"), "--a 1 --b"),
        (("without --a", "--b 3"), "--b 3, and without --a"),
        (("without --a", "--b 3", "without --c"), "--b 3, and without --a and without --c"),
        (("without --a",), "without --a"),
    ],
)
def test_advice_separates_flags_to_give_from_flags_to_leave_out(flags: tuple[str, ...], text: str) -> None:
    """ "without --ds.adam_offload --ds.zero_stage 3" looked as if both were to be left out."""
    advised = advice.Advice(flags, "why", run(), True)
    assert str(advised) == text
    console = Console(record=True, width=400, file=io.StringIO())
    print_assessment(console, assess(run(), NODE, SHAPES), [advised], None)
    assert f"try: {text}  (why)" in console.export_text()


HYBRID = ("--train.colocate_all", "--vllm.enable_sleep")


@pytest.mark.parametrize(
    ("asked", "flags"),
    [
        ({}, (*HYBRID, "--ds.enable_sleep")),
        ({"vllm__num_engines": 2}, (*HYBRID, "--vllm.num_engines 4", "--ds.enable_sleep")),
        ({"ds__adam_offload": True}, HYBRID),
        (
            {"train__colocate_critic_reward": True},
            (*HYBRID, "--ds.enable_sleep", "without --train.colocate_critic_reward"),
        ),
    ],
)
def test_all_share_gpus_where_there_are_too_few(asked: dict[str, Any], flags: tuple[str, ...]) -> None:
    asked = {"vllm__num_engines": 4, "vllm__tensor_parallel_size": 2, "ds__adam_offload": False} | asked
    planned = run_of("0.11.2", sections(**asked))
    shapes = dict.fromkeys([role.model for role in planned.roles], SMALL)
    found = assess(planned, NODE, shapes)
    assert "GPUs are requested" in found.refusal
    (advised,) = advise(found, NODE, shapes)
    assert advised.flags == flags
    assert not assess(advised.run, NODE, shapes).problems
    followed = asked | {"train__colocate_all": True, "train__colocate_critic_reward": False}
    followed |= {"vllm__enable_sleep": True, "vllm__num_engines": 4}
    followed |= {"ds__enable_sleep": not asked["ds__adam_offload"]}
    assert run_of("0.11.2", sections(**followed)) == advised.run


def test_sharing_all_gpus_and_less_memory_are_advised_together() -> None:
    planned = run_of("0.11.2", sections(vllm__num_engines=8, vllm__tensor_parallel_size=1))
    shapes = dict.fromkeys([role.model for role in planned.roles], QWEN_7B)
    machines = uniform_machines(1, 8, 70, 64, 4000)
    (advised,) = advise(assess(planned, machines, shapes), machines, shapes)
    assert advised.flags[0] == HYBRID[0]
    assert len(advised.flags) > len(HYBRID)
    assert not assess(advised.run, machines, shapes).problems


@pytest.mark.parametrize(
    "asked",
    [
        {"train__async_enable": True},  # engines of their own are the point of it
        {"ref__num_gpus_per_node": 4},
        {"vllm__tensor_parallel_size": 16},
        {"vllm__num_engines": 0},
    ],
)
def test_not_every_run_is_advised_to_share_all_gpus(asked: dict[str, Any]) -> None:
    planned = run_of("0.11.2", sections(**asked))
    assert list(advice._hybrid(planned)) == []


def test_roles_of_different_sizes_are_not_advised_to_share() -> None:
    planned = apart()
    request = replace(planned.request, groups=(Group("actor", 1, 8), Group("ref", 2, 4)))
    flags = [flags for flags, _, _ in advice._changes(replace(planned, request=request))]
    assert ("--train.colocate_actor_ref",) not in flags


def test_sharing_and_less_memory_are_advised_together() -> None:
    machines = uniform_machines(2, 8, 24, 64, 2000)
    found = assess(apart(train_batch=16, batch=128, checkpointing=False), machines, SHAPES)
    (one,) = advise(found, machines, SHAPES)
    assert one.flags[0] == "--train.colocate_actor_ref"
    assert len(one.flags) > 1
    assert not assess(one.run, machines, SHAPES).problems


def test_a_batch_that_deepspeed_accepts_is_advised() -> None:
    found = assess(run(actor=6), LARGE, SHAPES)
    assert "multiple of 6" in found.contradictions[0]
    assert [one.flags for one in advise(found, LARGE, SHAPES)] == [("--train.batch_size 126",)]
    small = assess(run(actor=6, batch=1), LARGE, SHAPES)
    assert [one.flags for one in advise(small, LARGE, SHAPES)] == [("--train.batch_size 6",)]


def test_what_would_fit_has_engines_that_vllm_accepts() -> None:
    """`vLLM cannot split 14 heads over 3 GPUs` stood next to `would fit: 2 engines x 3 GPUs`."""
    refusal = assess(run(engines=Engines(5, 3)), LARGE, SHAPES).refusal
    assert refusal
    assert "would fit" not in refusal
    fits = assess(run(engines=Engines(5, 2)), LARGE, SHAPES).refusal
    assert "would fit: actor 1 x 8 GPUs, 4 engines x 2 GPUs" in fits


def test_nodes_with_different_gpus_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "nodes.yaml"
    file.write_text("nodes: [{gpu_type: H100, gpu_memory: 80}, {gpu_type: L40S, gpu_memory: 48}]")
    machines = cluster_spec.read_machines(file)
    found = assess(run(), machines, SHAPES)
    assert any("1 with H100 80 GiB, 1 with L40S 48 GiB" in note for note in found.notes)
    assert "node-2: 8 GPUs L40S" in shown(found, machines)
    same = CLUSTER
    assert not any("different GPUs" in note for note in assess(run(), same, SHAPES).notes)


def test_engines_are_sized_for_the_smallest_gpu_that_they_use() -> None:
    """The weights of 7.6 B parameters do not fit on 16 GiB, where only the actor is."""
    machines = [Machine("a", 4, 64, 80 * GIB), Machine("b", 8, 64, 16 * GIB)]
    planned = run("big", engines=Engines(4, 1), zero=Zero(3, 1, offload=True))
    found = assess(planned, machines, SHAPES)
    assert not found.problems
    assert found.engine == assess(planned, uniform_machines(2, 8, 80, 64, 0), SHAPES).engine
    swapped = [replace(machines[0], gpu_memory=16 * GIB), replace(machines[1], gpu_memory=80 * GIB)]
    assert any("an engine's KV cache" in problem for problem in assess(planned, swapped, SHAPES).problems)
    unplaced = assess(run("big", engines=Engines(8, 1), zero=planned.zero), machines, SHAPES)
    assert unplaced.refusal
    assert any("an engine's KV cache" in problem for problem in unplaced.problems)


def test_the_type_of_a_ray_node_is_that_of_its_resource() -> None:
    resources = {"GPU": 8.0, "CPU": 64.0, "accelerator_type:H100": 1.0}
    table = [{"Alive": True, "NodeManagerAddress": "a", "Resources": resources}]
    (machine,) = cluster_spec.machines_of_nodes(table, [FreeNode("a", 8, 64, 8)], 80.0)
    assert machine.gpu_type == "H100"


@pytest.mark.timeout(60)
def test_the_largest_cluster_is_planned_in_seconds() -> None:
    """Ray's placement was predicted in a time that grew with the square of the nodes."""
    machines = uniform_machines(20_000, 8, 80, 64, 500)
    planned = run(engines=Engines(10_000, 4))
    wide = replace(planned, request=replace(planned.request, groups=(Group("actor", 10_000, 8),)))
    free = [machine.free for machine in machines]
    assert len(upstream_layout(free, wide.request, ("actor", ENGINES)).engines) == 10_000
    assert symmetric_layout(planned, machines, SHAPES) is None


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, ["ref"]),
        ({"tokens": 8192, "rollout_tokens": 8192}, ["ref"]),
        ({"batch": 96}, []),
        ({"batch": 100}, ["actor", "ref"]),
        ({"batch": 100, "tokens": 8192, "rollout_tokens": 8192}, ["ref"]),
        ({"batch": 100, "tokens": 8192, "rollout_tokens": 8192, "ema": True}, ["actor", "ref"]),
        ({"batch": 100, "release": "0.5.1"}, ["actor", "ref"]),
    ],
    ids=str,
)
def test_models_that_are_not_trained_divide_the_batch_too(
    changes: dict[str, Any], refused: list[str]
) -> None:
    """128 is not a multiple of 6: the reference model ended with DeepSpeed's assertion, after the start."""
    planned = apart(engines=Engines(2, 1), **changes)
    groups = (Group("actor", 1, 8), Group("ref", 1, 6))
    roles = (planned.roles[0], replace(planned.roles[1], ranks=6))
    planned = replace(planned, roles=roles, request=replace(planned.request, groups=groups))
    found = assess(planned, LARGE, SHAPES)
    ends = [problem.rsplit(" ", 1)[1] for problem in found.problems]
    assert ends == refused, found.problems
    repaired = [run.batch for flags, _, run in advice._changes(planned) if "batch_size" in flags[0]]
    assert all(batch % 6 == 0 for batch in repaired if refused)
    assert bool(repaired) == bool(refused)


def test_the_ranks_of_a_ring_are_no_ranks_of_their_own_unless_a_flat_release_evaluates() -> None:
    """OpenRLHF 0.5.1 multiplies the batch of a trained model by the ring, and not that of another."""
    planned = run(ring=2, batch=4)
    assert not assess(planned, LARGE, SHAPES).problems
    (problem,) = assess(replace(planned, release="0.5.1"), LARGE, SHAPES).problems
    assert problem.endswith("a multiple of 8, the micro batch of 1 on all data-parallel ranks of ref")


def test_tuning_leaves_the_micro_batches_of_dynamic_batches() -> None:
    """DeepSpeed compares them with the batch of models that are not trained; nothing else uses them."""
    planned = run(tokens=8192, rollout_tokens=8192, train_batch=2, rollout_batch=4, batch=1024)
    tuned = tune(planned, LARGE, SHAPES)
    assert tuned.fits
    assert (tuned.run.train_batch, tuned.run.rollout_batch) == (2, 4)
    assert not any("micro_batch" in setting.text for setting in tuned.settings)


@pytest.mark.parametrize("changes", [{"tensor_parallel": 2}, {"muon": True}], ids=str)
def test_stage_3_is_not_proposed_where_the_run_would_end_at_its_start(changes: dict[str, Any]) -> None:
    machines = uniform_machines(2, 8, 32, 64, 2000)
    planned = run("big", **changes)
    assert not [flags for flags, _, _ in advice._changes(planned) if "--ds.zero_stage 3" in flags]
    assert [flags for flags, _, _ in advice._changes(run("big")) if "--ds.zero_stage 3" in flags]
    tuned = tune(planned, machines, SHAPES)
    assert tuned.run.zero.stage == 2


def test_tensor_parallel_ranks_have_all_tokens_of_a_dynamic_batch() -> None:
    """OpenRLHF multiplies the tokens of a GPU by both; only the ranks of a ring divide a sequence."""
    few, ring, parallel = (
        need(planned, planned.roles[0], SMALL).activations
        for planned in (run(tokens=8192), run(tokens=8192, ring=2), run(tokens=8192, tensor_parallel=2))
    )
    assert ring == few
    assert parallel == need(run(tokens=16384), run().roles[0], SMALL).activations > few


def test_a_dynamic_rollout_has_up_to_twice_the_tokens() -> None:
    """With 8 ranks 15 micro batches become 8."""
    ref = run().roles[1]
    dynamic = need(run(tokens=8192, rollout_tokens=8192), ref, SMALL).activations
    one = run(actor=1, tokens=8192, rollout_tokens=8192)
    assert need(one, one.roles[1], SMALL).activations * 15 == dynamic * 8


QWEN3_30B = parse_shape(
    "layers:48,hidden:2048,intermediate:768,heads:32,kv_heads:4,head_dim:128,vocabulary:151936,experts:128,active:8"
)
EXPERTS = 48 * 128 * 3 * 2048 * 768


@pytest.mark.parametrize(
    ("stage", "release", "stacked"), [(3, "0.11.2", EXPERTS), (2, "0.11.2", 0), (3, "0.5.1", 0)]
)
def test_every_rank_stacks_the_experts_of_the_whole_model_at_stage_3(
    stage: int, release: str, stacked: int
) -> None:
    """Transformers converts them on each host before ZeRO-3 shares them: 54 GiB of Qwen3-30B-A3B per rank."""
    planned = run(zero=Zero(stage, 1), release=release)
    weights = QWEN3_30B.total // (8 if stage == 3 else 1)
    for role in planned.roles:
        assert need(planned, role, QWEN3_30B).loading == pytest.approx(2 * (weights + stacked), abs=2)


def test_a_plan_counts_experts_that_are_gathered_whole() -> None:
    """Gradients of 603,979,776 parameters, more than a bucket of 500 million."""
    actor = need(run(zero=Zero(3, 1)), run().roles[0], QWEN3_30B)
    assert actor.buffers == 2 * (500_000_000 + 1_000_000_000 + 128 * 3 * 2048 * 768)
    flat = need(run(zero=Zero(3, 1), release="0.5.1"), run().roles[0], QWEN3_30B)
    assert flat.buffers == 2 * (500_000_000 + 1_000_000_000)


def test_adapters_of_experts_in_one_parameter_have_twice_the_rank_for_gate_and_up() -> None:
    """PEFT 0.21 finds them by name for `all-linear`: 8 x 128 x (3 x 2048 + 5 x 768) in a layer."""
    actor = run().roles[0]
    new, old = (
        need(run(lora=8, zero=Zero(0, 1), release=release), actor, QWEN3_30B).gradients
        for release in ("0.11.2", "0.5.1")
    )
    assert new - old == 2 * 8 * 48 * 128 * 2 * 768


@pytest.mark.parametrize(
    ("changes", "copies"),
    [
        ({}, [0, 8]),
        ({"tensor_parallel": 2}, [0, 1]),
        ({"zero": Zero(3, 1)}, [0, 1]),
        ({"release": "0.5.1"}, [0, 1]),
    ],
    ids=str,
)
def test_saving_needs_host_memory(changes: dict[str, Any], copies: list[int]) -> None:
    """Rank 0 gathers the weights; those that are not sharded OpenRLHF 0.11.2 copies on every rank."""
    found = assess(run("big", **changes), LARGE, SHAPES)
    assert sorted(node.memory_saving for node in found.nodes) == [2 * QWEN_7B.total * each for each in copies]
    for node in found.nodes:
        assert node.memory_needed >= node.memory_running + node.memory_saving


def test_the_critic_is_not_saved_without_its_flag() -> None:
    planned = apart("critic", "reward", engines=Engines(2, 1))
    found = assess(planned, uniform_machines(3, 8, 80, 64, 2000), SHAPES)
    assert not any(node.memory_saving for node in found.nodes)
