"""Where upstream's own code puts ranks and engines, on Ray's nodes with GPUs that are not there."""

import pytest

SECONDS = 400

# Upstream's trainer up to where the models would be loaded; actors are recorded and not started.
STAGE = """
import itertools
import time
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import PlacementGroup, placement_group_table

pretend_flash_attn()
import openrlhf.cli.train_ppo_ray as train_ppo_ray
from openrlhf.trainer.ray import launcher, vllm_engine

NODES, GPUS, CPUS = 3, 8, 32
cluster = Cluster()
for index in range(NODES):
    address = {"node_ip_address": f"127.0.1.{index + 1}"} if index else {}
    limits = {"object_store_memory": 80 << 20, "include_dashboard": False}
    cluster.add_node(num_cpus=CPUS, num_gpus=GPUS, **limits, **address)
ray.init(address=cluster.address, log_to_driver=False)
NODE_IDS = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes()}
PINS = sorted(NODE_IDS)
os.environ["RLHF_STACK_PLACEMENT_TIMEOUT"] = "5"


class Planned(Exception):
    pass


real_get = ray.get


def get(what, *, timeout=None):
    # A wait without a deadline ends here after some seconds, and says that it had none.
    try:
        return real_get(what, timeout=timeout or 20)
    except ray.exceptions.GetTimeoutError:
        raise TimeoutError("waited for ever" if timeout is None else "waited to the deadline") from None


ray.get = get


class Recorded:
    # Stands for an actor class of upstream: what it is asked to be is kept, and nothing is started.
    def __init__(self, role):
        self.role, self.__name__, self.made = role, role, []

    def options(self, **options):
        def remote(*_, **arguments):
            self.made.append((options, arguments))
            address = types.SimpleNamespace(remote=lambda: ray.put(("127.0.0.1", 1)))
            return types.SimpleNamespace(get_master_addr_port=address)

        return types.SimpleNamespace(remote=remote)

    def where(self):
        # The node of the bundle that each actor was given, in the order in which they were made.
        return [node_of(options["scheduling_strategy"]) for options, _ in self.made]


def node_of(strategy, bundle=None):
    index = strategy.placement_group_bundle_index if bundle is None else bundle
    return placement_group_table(strategy.placement_group)["bundles_to_node_id"][index]


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


def stage(free, run, cpus=CPUS):
    # What happens where ``free`` GPUs are left on the nodes: "" or what went wrong.
    taken = [{"GPU": GPUS - left, "CPU": CPUS - cpus, f"node:{pin}": 0.001} for left, pin in zip(free, PINS)]
    taken = [{name: amount for name, amount in bundle.items() if amount} for bundle in taken]
    others = ray.util.placement_group(taken)
    assert others.wait(30)
    before = set(ray.util.placement_group_table())

    try:
        return run()
    finally:
        for number in set(ray.util.placement_group_table()) - before | {others.id.hex()}:
            if ray.util.placement_group_table()[number]["state"] != "REMOVED":
                ray.util.remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(number))))
        until = itertools.count()
        while ray.available_resources().get("GPU") != NODES * GPUS and next(until) < 200:
            time.sleep(0.05)


def stop(*_, **__):
    raise Planned


def train(args):
    # Upstream's train() with recorded actors: them by role.
    actors = {name: Recorded(name) for name in ("actor", "ref", "critic", "reward", "engine")}
    train_ppo_ray.get_strategy = lambda _: types.SimpleNamespace(print=lambda *_: None)
    train_ppo_ray.PolicyModelActor = actors["actor"]
    train_ppo_ray.ReferenceModelActor = actors["ref"]
    train_ppo_ray.CriticModelActor = actors["critic"]
    train_ppo_ray.RewardModelActor = actors["reward"]
    vllm_engine.RolloutRayActor = actors["engine"]
    trainer = types.ModuleType("openrlhf.trainer.ppo_trainer")
    trainer.PPOTrainer = types.SimpleNamespace(remote=stop)
    sys.modules["openrlhf.trainer.ppo_trainer"] = trainer
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


def finish(problems):
    ray.shutdown()
    cluster.shutdown()
    problems = [problem for problem in problems if problem]
    print("; ".join(problems) or "no engine straddles, no group of ranks, and what has no place is an error")
    sys.exit(bool(problems))
"""

ENGINES = (
    STAGE
    + """
def three_of_six():
    actors = train(arguments(role(1, 1), (3, 4)))
    found = straddling(actors["engine"])
    return f"three nodes of six: engines {found} straddle" if found else ""


def few_cpus():
    try:
        train(arguments(role(2, 6)))
    except TimeoutError as error:
        return f"fewer CPUs than GPUs: {error}"
    except RuntimeError as error:
        assert "CPUs are missing" in str(error), error
    return ""


def drivers():
    engine = train(arguments(role(1, 1), (2, 4)))["engine"]
    for options, given in engine.made:
        strategy = options["scheduling_strategy"]
        assert node_of(strategy) == node_of(strategy, given["bundle_indices"][0])
    asked = [options["num_cpus"] for options, _ in engine.made]
    return "" if all(asked) else f"engine drivers ask for {asked} CPUs, so Ray 2.9.3 places them anywhere"


problems = [
    stage([6, 6, 7], three_of_six),
    stage([8, 8, 8], few_cpus, cpus=3),
    stage([8, 8, 8], drivers),
]
finish(problems)
"""
)

RANKS = (
    STAGE
    + """
def ranks_in_order():
    # A script's own group, which is not planned, as upstream's trainer makes one for each role.
    actors = Recorded("actor")
    launcher.RayActorGroup(3, 8, actors, duplicate_actors=8)
    nodes = actors.where()
    found = [first // 8 for first in range(0, 24, 8) if len(set(nodes[first : first + 8])) > 1]
    return f"24 ranks on three nodes: groups {found} of 8 ranks straddle" if found else ""


def few_cpus():
    try:
        launcher.RayActorGroup(2, 6, Recorded("actor"))
    except TimeoutError as error:
        return f"fewer CPUs than GPUs: {error}"
    except RuntimeError as error:
        assert "NO_RESOURCES" in str(error) and "CPUs are missing" in str(error), error
    return ""


finish([stage([8, 8, 8], ranks_in_order), stage([8, 8, 8], few_cpus, cpus=3)])
"""
)


@pytest.mark.carries("openrlhf==0.11.2")
@pytest.mark.timeout(SECONDS)
def test_engines_and_groups_are_planned(proves):
    proves(
        ENGINES,
        r"three nodes of six: engines \[1\] straddle; fewer CPUs than GPUs: waited for ever; "
        r"engine drivers ask for \[0, 0\] CPUs",
    )


@pytest.mark.carries("openrlhf==0.11.2")
@pytest.mark.timeout(SECONDS)
def test_ranks_follow_nodes(proves):
    proves(
        RANKS,
        r"24 ranks on three nodes: groups \[0, 1, 2\] of 8 ranks straddle; "
        r"fewer CPUs than GPUs: waited for ever",
    )
