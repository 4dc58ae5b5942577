"""The same of OpenRLHF 0.5, whose engines have a placement group each, and whose groups one bundle a node."""

from pathlib import Path

import pytest

SECONDS = 400
STAGE = Path(__file__).with_name("stage.py").read_text(encoding="utf-8")

# Upstream's trainer up to where the engines would be started.
FLAT = """
import openrlhf.cli.train_ppo_ray as train_ppo_ray
from openrlhf.trainer.ray import launcher, vllm_engine


def arguments(engines=(0, 1), pairs=(1, 2), actor=None):
    sizes = {"actor": actor or pairs, "ref": actor or pairs, "critic": pairs, "reward": pairs}
    given = {f"{role}_num_nodes": nodes for role, (nodes, _) in sizes.items()}
    given |= {f"{role}_num_gpus_per_node": gpus for role, (_, gpus) in sizes.items()}
    return types.SimpleNamespace(
        **given, colocate_actor_ref=True, colocate_critic_reward=True, critic_pretrain="m", pretrain="m",
        reward_pretrain="m", remote_rm_url=None, zero_stage=2, seed=0, max_len=64,
        vllm_num_engines=engines[0], vllm_tensor_parallel_size=engines[1], enable_prefix_caching=False,
        enforce_eager=True,
    )


ROLES = ("ActorModelRayActor", "ReferenceModelRayActor", "CriticModelRayActor", "RewardModelRayActor")
make_engines = vllm_engine.create_vllm_engines


def train(args):
    # Upstream's train() with recorded actors: them by class.
    actors = {name: Recorded(name) for name in (*ROLES, "LLMRayActor")}
    models = {name: actors[name] for name in ROLES}
    replace(train_ppo_ray, get_strategy=lambda _: types.SimpleNamespace(print=print), **models)
    replace(vllm_engine, LLMRayActor=actors["LLMRayActor"])
    replace(train_ppo_ray, create_vllm_engines=lambda *given, **named: stop(make_engines(*given, **named)))
    try:
        train_ppo_ray.train(args)
    except Planned:
        return actors


def straddling(engines):
    # Engines with workers on several nodes: vLLM starts one in each bundle of the engine's own group.
    found = []
    for index, (options, _) in enumerate(engines.made):
        strategy = options["scheduling_strategy"]
        bundles = range(strategy.placement_group.bundle_count)
        if len({node_of(strategy, bundle) for bundle in bundles}) > 1:
            found.append(index)
    return found
"""

ENGINES = (
    STAGE
    + FLAT
    + """
def two_pairs_beside_three_engines():
    actors = train(arguments(engines=(3, 4)))
    found = straddling(actors["LLMRayActor"])
    return f"two pairs next to three engines of 4: engines {found} straddle" if found else ""


def three_nodes_of_six():
    actors = train(arguments(engines=(3, 4), pairs=(1, 1)))
    assert straddling(actors["LLMRayActor"]) == []
    drivers = [options for options, _ in actors["LLMRayActor"].made]
    assert all(options["num_cpus"] for options in drivers), "Ray 2.9.3 would place them anywhere"
    assert [options["scheduling_strategy"].placement_group_bundle_index for options in drivers] == [0] * 3
    return ""


def pairs_share_gpus():
    actors = train(arguments(engines=(1, 2), actor=(2, 2)))
    where = [actors[role].where() for role in ROLES[:2]]
    assert where[0] == where[1]
    assert where[0][0] == where[0][1] != where[0][2] == where[0][3], "on two nodes, ranks in their order"
    return ""


finish([
    stage([8, 8, 0], two_pairs_beside_three_engines),
    stage([6, 6, 7], three_nodes_of_six),
    stage([8, 8, 8], pairs_share_gpus),
    stage([8, 8, 8], lambda: few_cpus(train, arguments(actor=(2, 4))), cpus=3),
])
"""
)

RANKS = (
    STAGE
    + FLAT
    + """
def two_nodes_of_four():
    # A script's own group, which is not planned, as upstream's trainer makes one for each role.
    actors = Recorded("actor")
    launcher.PPORayActorGroup(2, 4, actors)
    nodes = actors.where()
    assert len(set(nodes[:4])) == len(set(nodes[4:])) == 1 and nodes[0] != nodes[4]
    return ""


finish([
    stage([8, 8, 8], two_nodes_of_four),
    stage([8, 8, 8], lambda: few_cpus(launcher.PPORayActorGroup, 2, 6, Recorded("actor")), cpus=3),
])
"""
)


@pytest.mark.patch("openrlhf/0.5.1/0030-plan-placement")
@pytest.mark.timeout(SECONDS)
def test_engines_and_groups_are_planned(proves):
    proves(
        ENGINES,
        r"two pairs next to three engines of 4: engines \[2\] straddle; "
        r"fewer CPUs than GPUs: waited for ever",
    )


@pytest.mark.patch("openrlhf/0.5.1/0031-order-ranks-by-node")
@pytest.mark.timeout(SECONDS)
def test_the_wait_for_a_group_of_a_script_has_a_deadline(proves):
    proves(RANKS, r"fewer CPUs than GPUs: waited for ever")
