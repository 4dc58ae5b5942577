from pathlib import Path

import pytest

TRAINER = Path(__file__).with_name("flat.py").read_text(encoding="utf-8")

# An engine that dies during startup, and models that take long to load or to train.
DEAD = """
import time
import ray

import openrlhf.cli.train_ppo_ray as train_ppo_ray

own_ray(num_cpus=4, num_gpus=2)
bound(30, "the trainer does not detect that an engine is dead")


@stub("an engine, which dies")
@ray.remote(num_cpus=0)
class Dead:
    def __init__(self):
        raise OSError("libnuma.so.1 is missing")


@ray.remote(num_cpus=0)
def load():
    time.sleep(600)


def some(**given):
    return types.SimpleNamespace(**given)


def engines(*_, **__):
    return [Dead.remote()]


replace(train_ppo_ray, get_strategy=lambda _: some(print=print), create_vllm_engines=engines)


def run(args):
    try:
        train_ppo_ray.train(args)
    except ray.exceptions.RayActorError as error:
        assert "libnuma.so.1 is missing" in str(error), error
        print("the trainer ends at once with the engine's reason")
    finally:
        ray.shutdown()
"""

SECTIONS = (
    DEAD
    + """
@stub("the actors of a role, which load for ever")
class Models:
    def __init__(self, *_, **__):
        pass

    def async_init_model_from_pretrained(self, *_):
        return [load.remote()]


none = some(num_nodes=1, num_gpus_per_node=1, model_name_or_path=None, remote_url="r")
args = some(
    train=some(
        colocate_actor_ref=False, colocate_all=False, colocate_critic_reward=False, async_enable=False,
        seed=0, full_determinism_enable=False, agent_func_path=None,
    ),
    actor=some(num_nodes=1, num_gpus_per_node=1, model_name_or_path="m"), ref=none, critic=none, reward=none,
    algo=some(kl=some(init_coef=0), advantage=some(is_correction_level="off")),
    vllm=some(
        num_engines=0, tensor_parallel_size=1, enable_prefix_caching=False, enforce_eager=True,
        gpu_memory_utilization=0.5, enable_sleep=False,
    ),
    ds=some(ring_attn_size=1, tensor_parallel_size=1),
    data=some(max_len=64), rollout=some(max_new_tokens=8, temperature=1, top_p=1),
)
steps = some(get_max_steps=stub("the trainer's number of steps", remote=lambda: ray.put(1)))
trainer = stub("the trainer's actor", remote=lambda *_, **__: steps)
replace_module("openrlhf.trainer.ppo_trainer", PPOTrainer=trainer)
replace(train_ppo_ray, RayActorGroup=Models)


@stub("the number of engines")
class Counted(int):
    # The plan has no GPUs for the engine that is created above, and upstream still creates it.
    def __gt__(self, other):
        return True


args.vllm.num_engines = Counted(0)
run(args)
"""
)

# An engine that never starts, while the trained models wait for it in the rendezvous of the weight sync.
FLAT = (
    """
import os
import time

import ray

os.environ["RLHF_STACK_ENGINE_TIMEOUT"] = "5"
del os.environ["RLHF_STACK_EVENTS"]  # with events the trainer waits for its engines' location
own_ray(num_cpus=4, num_gpus=2)
"""
    + TRAINER
    + """
@stub("an engine, which never starts")
@ray.remote(num_cpus=0)
class Hanging:
    def __init__(self):
        time.sleep(600)

    def sync_error(self):
        pass


@ray.remote(num_cpus=0)
def train():
    time.sleep(600)


replace(train_ppo_ray, create_vllm_engines=lambda *_, **__: [Hanging.remote()])
Models.fit = train.remote
ends(
    lambda: train_ppo_ray.train(args),
    "engines [0] are not up after 5 s",
    "an engine that does not start",
)
"""
)


@pytest.mark.patch("openrlhf/0.11.2/0033-report-engine-startup")
@pytest.mark.timeout(200)
def test_an_engine_that_dies_ends_the_trainer_with_its_reason(proves):
    proves(SECTIONS, "does not detect that an engine is dead")


@pytest.mark.patch("openrlhf/0.5.1/0032-report-engine-startup")
@pytest.mark.timeout(200)
def test_an_engine_that_never_starts_ends_the_older_trainer_at_a_deadline(proves):
    proves(FLAT, "still waits for an engine that does not start")
