import pytest

DEFAULT = """
import runpy

import openrlhf.utils


class Parsed(Exception):
    pass


def strategy(arguments):
    raise Parsed(getattr(arguments, "vllm_sync_backend", None) or arguments.vllm.sync_backend)


os.environ["RLHF_STACK_SYNC_BACKEND"] = "gloo"
import ray
replace(ray, is_initialized=lambda: True)
replace(openrlhf.utils, get_strategy=strategy)
found = []
for given in ([], [FLAG, "nccl"]):
    sys.argv = ["train_ppo_ray", *MODELS, *given]
    try:
        runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")
    except Parsed as parsed:
        found.append(str(parsed))
assert found == ["gloo", "nccl"], f"the image's default is gloo; without and with a flag: {found}"
print("the image's default applies, and the option overrides it")
"""

REQUESTED = """
import vllm
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer

on_cpu()
alone()
import ray
replace(ray, get=lambda references, **_: references)
replace(vllm, __version__="0.5.0")
arguments = types.SimpleNamespace(
    aux_loss_coef=0, advantage_estimator="gae", packing_samples=False, use_wandb=None, use_tensorboard=None,
    vllm_num_engines=0, vllm_tensor_parallel_size=1,
)
strategy, models = types.SimpleNamespace(args=arguments), [None] * 9
taken = []
for arguments.vllm_sync_backend in ("pigeon", "gloo"):
    try:
        trainer = ActorPPOTrainer(strategy, *models, vllm_engines=[])
    except Exception as error:
        taken.append(str(error))
    else:
        taken.append(type(trainer._model_update_group).__name__)
refused = "weight sync backend pigeon: expected one of nccl, gloo, auto"
assert taken == [refused, "GlooGroup"], f"an unknown backend was requested, then gloo: {taken}"
print("the requested backend is taken, and an unknown one refused")
"""

DEADLINE = """
import multiprocessing
import socket

import torch

wrap = load("openrlhf/trainer/ray/vllm_worker_wrap.py", "wrap")
os.environ["RLHF_STACK_SYNC_TIMEOUT"] = "2"


def join(port, results):
    alone()
    on_cpu()
    worker = wrap.WorkerWrap.__new__(wrap.WorkerWrap)
    try:
        worker.init_process_group("127.0.0.1", port, 1, 3, "openrlhf", "gloo")
    except RuntimeError as error:
        results.put(str(error))


held = socket.socket()  # without a listener: no other process gets the port, and rank 0 listens at it
held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
held.bind(("127.0.0.1", 0))
port = held.getsockname()[1]
fork = multiprocessing.get_context("fork")
results = fork.Queue()
worker = fork.Process(target=join, args=(port, results), daemon=True)
worker.start()
worker.join(30)
waits = worker.is_alive()
worker.kill()
assert not waits, "an engine still waits after 30 s for a trainer that has ended, with a deadline of 2 s"
assert "within 2 s (RLHF_STACK_SYNC_TIMEOUT)" in results.get(timeout=5)
print("the engine names the trainer that has ended")
"""


@pytest.mark.parametrize(
    ("flag", "models"),
    [
        pytest.param(
            "--vllm.sync_backend",
            ["--actor.model_name_or_path", "a", "--reward.remote_url", "b", "--vllm.num_engines", "1"],
            marks=pytest.mark.patch("openrlhf/0.11.2/0050-sync-weights"),
            id="0.11",
        ),
        pytest.param(
            "--vllm_sync_backend",
            ["--pretrain", "a", "--reward_pretrain", "b", "--vllm_num_engines", "1"],
            marks=pytest.mark.patch("openrlhf/0.5.1/0006-honour-the-sync-backend"),
            id="0.5",
        ),
    ],
)
def test_the_default_backend_is_that_of_the_image(proves, flag, models):
    proves(f"FLAG, MODELS = {flag!r}, {models!r}\n{DEFAULT}", r"without and with a flag: \['nccl', 'nccl'\]")


@pytest.mark.patch("openrlhf/0.5.1/0006-honour-the-sync-backend")
def test_the_requested_backend_is_not_replaced(proves):
    """Upstream replaces it by gloo for a newer vLLM."""
    proves(REQUESTED, r"an unknown backend was requested, then gloo: \['ProcessGroup'")


@pytest.mark.patch("openrlhf/0.5.1/0006-honour-the-sync-backend")
def test_an_engine_waits_for_the_trainer_no_longer_than_its_deadline(proves):
    """Upstream's waits half an hour."""
    proves(DEADLINE, r"still waits after 30 s")
