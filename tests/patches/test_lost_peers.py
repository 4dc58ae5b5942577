from pathlib import Path

import pytest

TRAINER = Path(__file__).with_name("flat.py").read_text(encoding="utf-8")

# The driver waits for a rank of upstream's class, which is killed.
LOST = """
import signal
import socket

import ray

from openrlhf.cli import train_ppo_ray

own_ray(num_cpus=2)


class Rank:
    def __init__(self, base, *place):
        launcher = importlib.import_module("openrlhf.trainer.ray.launcher")
        self.policy = type("Policy", (getattr(launcher, base),), {})(2, 1, *place, None, None)

    def join(self):
        self.policy._setup_distributed(stub("the strategy's process group", setup_distributed=lambda: None))

    def fit(self):
        os.kill(os.getpid(), signal.SIGKILL)


def lose(*base):
    rank = ray.remote(num_cpus=0)(Rank).remote(*base)
    ray.get(rank.join.remote())
    replace(train_ppo_ray, get_strategy=lambda _: ray.get(rank.fit.remote()))


def run(args):
    who = f"rank 1 of Policy on node {socket.gethostname()} ({ray.util.get_node_ip_address()}) is dead: "
    ends(lambda: train_ppo_ray.train(args), who, "a rank that was killed")
"""

SECTIONS = LOST + "lose('BaseModelActor')\nrun(types.SimpleNamespace())\n"
FLAT = LOST + TRAINER + "lose('BasePPORole', 0)\nrun(args)\n"


@pytest.mark.parametrize(
    "probe",
    [
        pytest.param(SECTIONS, marks=pytest.mark.patch("openrlhf/0.11.2/0054-name-lost-actors"), id="0.11"),
        pytest.param(FLAT, marks=pytest.mark.patch("openrlhf/0.5.1/0036-name-lost-actors"), id="0.5"),
    ],
)
def test_a_killed_rank_is_named_with_its_node(proves, probe):
    proves(probe, "The actor died unexpectedly before finishing this task")
