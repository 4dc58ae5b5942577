"""Where upstream's own code places ranks and engines, on simulated Ray nodes with simulated GPUs."""

from pathlib import Path

import pytest

SECONDS = 400
STAGE = Path(__file__).with_name("stage.py").read_text(encoding="utf-8")

# Upstream's trainer up to the point where it would load the models.
SECTIONS = """
import openrlhf.cli.train_ppo_ray as train_ppo_ray
from openrlhf.trainer.ray import launcher, vllm_engine


def role(nodes, gpus):
    models = {"model_name_or_path": "m", "remote_url": None}
    return types.SimpleNamespace(num_nodes=nodes, num_gpus_per_node=gpus, **models)


def arguments(actor, engines=None, ref=None, critic=None, block=1):
    none = types.SimpleNamespace(num_nodes=1, num_gpus_per_node=1, model_name_or_path=None, remote_url="r")
    return types.SimpleNamespace(
        train=types.SimpleNamespace(
            colocate_actor_ref=ref is not None, colocate_all=False, colocate_critic_reward=critic is not None,
            async_enable=False, seed=0, full_determinism_enable=False, agent_func_path=None,
        ),
        actor=actor, ref=ref or actor, critic=critic or none, reward=critic or none,
        algo=types.SimpleNamespace(
            kl=types.SimpleNamespace(init_coef=0.1 if ref else 0),
            advantage=types.SimpleNamespace(is_correction_level="off"),
        ),
        vllm=types.SimpleNamespace(
            num_engines=engines[0] if engines else 0, tensor_parallel_size=engines[1] if engines else 1,
            enable_prefix_caching=False, enforce_eager=True, gpu_memory_utilization=0.5, enable_sleep=False,
        ),
        ds=types.SimpleNamespace(ring_attn_size=1, tensor_parallel_size=block),
        data=types.SimpleNamespace(max_len=64),
        rollout=types.SimpleNamespace(max_new_tokens=8, temperature=1, top_p=1),
    )


def train(args):
    # Upstream's train() with recorded actors, which it returns by role.
    classes = {
        "actor": "PolicyModelActor", "ref": "ReferenceModelActor", "critic": "CriticModelActor",
        "reward": "RewardModelActor", "engine": "RolloutRayActor",
    }
    actors = {role: Recorded(name) for role, name in classes.items()}
    models = {classes[role]: actors[role] for role in ("actor", "ref", "critic", "reward")}
    replace(train_ppo_ray, get_strategy=lambda _: types.SimpleNamespace(print=print), **models)
    replace(vllm_engine, RolloutRayActor=actors["engine"])
    replace_module("openrlhf.trainer.ppo_trainer", PPOTrainer=types.SimpleNamespace(remote=stop))
    try:
        train_ppo_ray.train(args)
    except Planned:
        return actors


def straddling(engines):
    # Engines with workers on several nodes.
    found = []
    for index, (options, given) in enumerate(engines.made):
        strategy = options["scheduling_strategy"]
        if len({node_of(strategy, bundle) for bundle in given["bundle_indices"]}) > 1:
            found.append(index)
    return found
"""

ENGINES = (
    STAGE
    + SECTIONS
    + """
def three_of_six():
    actors = train(arguments(role(1, 1), (3, 4)))
    found = straddling(actors["engine"])
    return f"three nodes of six: engines {found} straddle" if found else ""


def drivers():
    engine = train(arguments(role(1, 1), (2, 4)))["engine"]
    for options, given in engine.made:
        strategy = options["scheduling_strategy"]
        assert node_of(strategy) == node_of(strategy, given["bundle_indices"][0])
    cpus = [options["num_cpus"] for options, _ in engine.made]
    return "" if all(cpus) else f"engine drivers request {cpus} CPUs, so Ray 2.9.3 places them anywhere"


def shared():
    # Actor and reference share GPUs, and critic and reward model.
    actors = train(arguments(role(1, 2), (1, 1), ref=role(1, 2), critic=role(1, 1)))
    pairs = [("actor", "ref"), ("critic", "reward")]
    apart = [pair for pair in pairs if actors[pair[0]].where() != actors[pair[1]].where()]
    return f"not on the same nodes: {apart}" if apart else ""


problems = [
    stage([6, 6, 7], three_of_six),
    stage([2, 1, 1], shared),
    stage([8, 8, 8], lambda: few_cpus(train, arguments(role(2, 6))), cpus=3),
    stage([8, 8, 8], drivers),
]
finish(problems)
"""
)

RANKS = (
    STAGE
    + SECTIONS
    + """
def ranks_in_order():
    # A group that a script creates itself, without a plan, as upstream's trainer does for each role.
    actors = Recorded("Own")
    launcher.RayActorGroup(3, 8, actors, duplicate_actors=8)
    nodes = actors.where()
    found = [first // 8 for first in range(0, 24, 8) if len(set(nodes[first : first + 8])) > 1]
    return f"24 ranks on three nodes: groups {found} of 8 ranks straddle" if found else ""


finish([
    stage([8, 8, 8], ranks_in_order),
    stage([8, 8, 8], lambda: few_cpus(launcher.RayActorGroup, 2, 6, Recorded("Own")), cpus=3),
])
"""
)


@pytest.mark.patch("openrlhf/0.11.2/0031-plan-placement")
@pytest.mark.timeout(SECONDS)
def test_engines_and_groups_are_planned(proves):
    proves(ENGINES, r"three nodes of six: engines \[1\] straddle; engine drivers request \[0, 0\] CPUs")


@pytest.mark.patch("openrlhf/0.11.2/0032-order-ranks-by-node")
@pytest.mark.timeout(SECONDS)
def test_ranks_follow_nodes(proves):
    proves(
        RANKS,
        r"24 ranks on three nodes: groups \[0, 1, 2\] of 8 ranks straddle; "
        r"fewer CPUs than GPUs: waited for ever",
    )
