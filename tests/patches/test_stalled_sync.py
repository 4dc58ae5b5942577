from pathlib import Path

import pytest

TRAINER = Path(__file__).with_name("flat.py").read_text(encoding="utf-8")

ENGINES = """
import ray

from openrlhf.trainer.ray import vllm_engine

os.environ["RLHF_STACK_SYNC_TIMEOUT"] = "2"
own_ray(num_cpus=2)


@stub("an engine, which never answers")
class Engine:
    def sleep(self):
        threading.Event().wait()


engine = ray.remote(Engine).remote()
ends(
    lambda: vllm_engine.batch_vllm_engine_call([engine], "sleep"),
    "waited 2 s for sleep; engines [0] of 1 did not answer",
    "an engine that does not answer",
)
"""

# A trainer that is stopped during a sync, and an engine whose deadline has passed.
STOPPED = """
import ray

os.environ["RLHF_STACK_SYNC_TIMEOUT"] = "2"
own_ray(num_cpus=4, num_gpus=2)


@stub("a trainer's rank, which never answers")
class Rank:
    def sync(self):
        threading.Event().wait()


@stub("an engine, whose deadline has passed")
class Engine:
    def sync_error(self):
        return "weight sync, rank 1: rank 0 (the trainer) does not answer"

    def where(self):
        return []


trainer, engine = ray.remote(num_cpus=0)(Rank).remote(), ray.remote(num_cpus=0)(Engine).remote()


def run(action):
    ends(action, "rank 0 (the trainer) does not answer", "a trainer that is stopped")
"""

SYNC = (
    STOPPED
    + """
from openrlhf.trainer.ppo_trainer import BasePPOTrainer


class Trainer(BasePPOTrainer):
    def __init__(self):
        self.args = types.SimpleNamespace(vllm=types.SimpleNamespace(enable_sleep=False))
        self.vllm_engines = [engine]
        self.actor_model_group = stub(
            "the actor's ranks", async_run_method=lambda method_name: [trainer.sync.remote()]
        )

    def fit(self):
        pass


run(lambda: Trainer().broadcast_to_vllm())
"""
)

# OpenRLHF 0.5 waits for the whole training, which the actor's ranks drive.
TRAINING = (
    STOPPED
    + TRAINER
    + """
Models.fit = trainer.sync.remote
replace(train_ppo_ray, create_vllm_engines=lambda *_, **__: [engine])
run(lambda: train_ppo_ray.train(args))
"""
)


@pytest.mark.patch("openrlhf/0.11.2/0051-end-stalled-syncs")
def test_an_engine_that_does_not_respond_is_named_within_the_deadline(proves):
    proves(ENGINES, "after 30 s it still waits for an engine")


@pytest.mark.patch("openrlhf/0.11.2/0051-end-stalled-syncs")
def test_an_engines_error_about_a_stopped_trainer_ends_the_run(proves):
    proves(SYNC, "after 30 s it still waits for a trainer")


@pytest.mark.patch("openrlhf/0.5.1/0035-end-stalled-syncs")
def test_an_engines_error_about_a_stopped_trainer_ends_the_older_trainer_too(proves):
    proves(TRAINING, "after 30 s it still waits for a trainer")
