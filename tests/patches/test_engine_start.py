from pathlib import Path

import pytest

FLAT_TRAINER, TRAINER = (
    Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("flat.py", "sections.py")
)

# An engine that dies during startup, and models that take long to load.
SECTIONS = (
    TRAINER
    + """
import time

bound(30, "the trainer does not detect that an engine is dead")


@stub("an engine, which dies")
@ray.remote(num_cpus=0)
class Dead:
    def __init__(self):
        raise OSError("libnuma.so.1 is missing")


@ray.remote(num_cpus=0)
def load():
    time.sleep(600)


Models.loaded = load.remote()
replace(train_ppo_ray, create_vllm_engines=lambda *_, **__: [Dead.remote()])
try:
    train_ppo_ray.train(args)
except ray.exceptions.RayActorError as error:
    assert "libnuma.so.1 is missing" in str(error), error
    print("the trainer ends at once with the engine's reason")
finally:
    ray.shutdown()
"""
)

# An engine that shares the trainer's GPU, does not sleep, and takes long to start.
SHARED = """
import time

import ray
from openrlhf.trainer.ray import vllm_engine

own_ray(num_cpus=2, num_gpus=1)


@stub("an engine, which starts after some seconds")
@ray.remote
class Slow:
    def __init__(self, **_):
        time.sleep(8)

    async def where(self):  # as upstream's, an asynchronous actor: others have a thread for each call
        return []


replace(vllm_engine, RolloutRayActor=Slow)
group = ray.util.placement_group([{"GPU": 1, "CPU": 1}])
ray.get(group.ready())
made = vllm_engine.create_vllm_engines(1, 1, "m", 0, False, False, True, 64, group, 0.5)
ready, _ = ray.wait([made[0].__ray_ready__.remote()], timeout=2)
ray.shutdown()
assert ready, "the trainer takes memory while an engine on its GPU measures what is free"
print("an engine on the trainer's GPU is up before the trainer is created")
"""

# An engine that never starts, while the trained models wait for it in the rendezvous of the weight sync.
FLAT = (
    """
import os
import time

import ray

os.environ["RLHF_STACK_ENGINE_TIMEOUT"] = "5"
own_ray(num_cpus=4, num_gpus=2)
"""
    + FLAT_TRAINER
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
del os.environ["RLHF_STACK_EVENTS"]  # with events the trainer waits for its engines' location
ends(
    lambda: train_ppo_ray.train(args),
    "engines [0] are not up after 5 s",
    "an engine that does not start",
)
"""
)

# A worker that Ray starts for an engine of several GPUs, in a process that was not told which engine it is.
WORKER = """
import ray
from openrlhf.trainer.ray import vllm_engine

own_ray(num_cpus=1)


class Actor(vllm_engine.LLMRayActor.__ray_metadata__.modified_class):
    def __init__(self, *arguments, **options):
        import vllm

        replace(vllm, LLM=stub("vLLM", start=lambda *_, **__: None).start)
        super().__init__(*arguments, **options)

    def engine_of_worker(self):
        from vllm.executor import ray_utils

        os.environ.pop("RLHF_STACK_ENGINE", None)
        ray_utils.RayWorkerWrapper()
        return os.environ.get("RLHF_STACK_ENGINE", "no engine")


actor = ray.remote(num_cpus=1)(Actor).remote("model", tensor_parallel_size=2, engine_index=3)
engine = ray.get(actor.engine_of_worker.remote())
ray.shutdown()
assert engine.endswith("/3"), f"a worker of engine 3 reports its startup for {engine}"
print("a worker reports its startup for its engine")
"""


@pytest.mark.patch("openrlhf/0.11.2/0033-report-engine-startup")
@pytest.mark.timeout(400)
def test_an_engine_that_dies_ends_the_trainer_with_its_reason(proves):
    proves(SECTIONS, "does not detect that an engine is dead")


@pytest.mark.patch("openrlhf/0.11.2/0033-report-engine-startup")
@pytest.mark.timeout(400)
def test_an_engine_on_the_trainers_gpu_is_up_before_the_trainer_takes_memory(proves):
    proves(SHARED, "takes memory while an engine on its GPU measures what is free")


@pytest.mark.patch("openrlhf/0.5.1/0032-report-engine-startup")
@pytest.mark.timeout(400)
def test_an_engine_that_never_starts_ends_the_older_trainer_at_a_deadline(proves):
    proves(FLAT, "still waits for an engine that does not start")


@pytest.mark.patch("openrlhf/0.5.1/0032-report-engine-startup")
@pytest.mark.timeout(400)
def test_a_worker_of_several_gpus_reports_the_startup_of_its_engine(proves):
    proves(WORKER, "reports its startup for no engine")
