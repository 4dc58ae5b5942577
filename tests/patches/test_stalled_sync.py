import pytest

ENGINES = """
import ray

pretend_flash_attn()
import threading
import time

from openrlhf.trainer.ray import vllm_engine

os.environ["RLHF_STACK_SYNC_TIMEOUT"] = "2"
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)


class Engine:
    def sleep(self):
        threading.Event().wait()


errors = []


def ask():
    try:
        vllm_engine.batch_vllm_engine_call([ray.remote(Engine).remote()], "sleep")
    except RuntimeError as error:
        errors.append(str(error))


asking = threading.Thread(target=ask, daemon=True)
asking.start()
asking.join(30)
assert errors, "after 30 s it still waits for an engine that does not answer"
assert "waited 2 s for sleep; engines [0] of 1 did not answer" in errors[0], errors
print(errors[0], flush=True)
os._exit(0)  # the engine never ends by itself
"""

TRAINER = """
import threading

import ray

pretend_flash_attn()
from openrlhf.trainer.ppo_trainer import BasePPOTrainer

ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)


class Rank:
    def broadcast_to_vllm(self):
        threading.Event().wait()


class Engine:
    def sync_error(self):
        return "weight sync, rank 1: rank 0 (the trainer) does not answer"


class Trainer(BasePPOTrainer):
    def __init__(self):
        rank = ray.remote(Rank).remote()
        self.args = types.SimpleNamespace(vllm=types.SimpleNamespace(enable_sleep=False))
        self.vllm_engines = [ray.remote(Engine).remote()]
        self.actor_model_group = types.SimpleNamespace(
            async_run_method=lambda method_name: [getattr(rank, method_name).remote()]
        )

    def fit(self):
        pass


os.environ["RLHF_STACK_SYNC_TIMEOUT"] = "2"
errors = []


def ask():
    try:
        Trainer().broadcast_to_vllm()
    except RuntimeError as error:
        errors.append(str(error))


asking = threading.Thread(target=ask, daemon=True)
asking.start()
asking.join(30)
assert errors, "after 30 s it still waits for a trainer that is stopped"
assert "rank 0 (the trainer) does not answer" in errors[0], errors
print(errors[0], flush=True)
os._exit(0)  # the trainer never ends by itself
"""


@pytest.mark.carries("openrlhf==0.11.2")
def test_an_engine_that_does_not_answer_is_named_within_the_deadline(proves):
    proves(ENGINES, "after 30 s it still waits for an engine")


@pytest.mark.carries("openrlhf==0.11.2")
def test_what_engines_say_of_a_stopped_trainer_ends_the_run(proves):
    proves(TRAINER, "after 30 s it still waits for a trainer")
