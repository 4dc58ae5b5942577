"""Upstream's unsafe pattern on one GPU: a rank waits in a barrier while another has an engine generate.

unsafe_barrier.py DIR: exit code 0 if generating was an error; the events have the reason.
"""

import os
import sys
from pathlib import Path

import ray
import torch.distributed as dist
from openrlhf.trainer.ray import launcher, vllm_engine
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as In
from rlhf_stack.demo import tiny_model
from vllm import SamplingParams

folder = Path(sys.argv[1])
tiny_model.make(folder, seed=0, steps=1, layers=1)
ray.init(num_cpus=4, num_gpus=1, include_dashboard=False, object_store_memory=200_000_000)
group = ray.util.placement_group([{"GPU": 1, "CPU": 2}])
assert group.wait(120)

(engine,) = vllm_engine.create_vllm_engines(
    1, 1, str(folder / "model"), 0, False, False, True, 128, shared_pg=group, gpu_memory_utilization=0.1
)


class Strategy:
    """The part of upstream's strategy that a rank without a model needs."""

    def setup_distributed(self):
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, os.environ["RANK"] == "0")
        dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)


parameters = SamplingParams(temperature=0, max_tokens=48, min_tokens=48)


@ray.remote
class Rank(launcher.BaseModelActor):
    def begin(self):
        self._setup_distributed(Strategy())

    def barrier(self):
        dist.barrier()

    def generate(self, engine):
        return len(ray.get(engine.generate.remote([1, 2, 3], parameters), timeout=60).outputs[0].token_ids)

    def generate_then_barrier(self, engine):
        tokens = self.generate(engine)
        dist.barrier()
        return tokens


def rank(number, *address):
    place = In(group, placement_group_bundle_index=0)
    options = Rank.options(num_cpus=0.2, num_gpus=0.2, scheduling_strategy=place)
    return options.remote(2, number, *address)


first = rank(0, None, None)
ranks = [first, rank(1, *ray.get(first.get_master_addr_port.remote(), timeout=200))]
ray.get([actor.begin.remote() for actor in ranks], timeout=200)
ray.get(engine.__ray_ready__.remote(), timeout=200)

# Sequentially: no rank waits while the engine generates.
ray.get([actor.barrier.remote() for actor in ranks], timeout=60)
assert ray.get(first.generate.remote(engine), timeout=60) == 48
ray.get([actor.barrier.remote() for actor in ranks], timeout=60)

waiting = ranks[1].barrier.remote()
try:
    ray.get(first.generate_then_barrier.remote(engine), timeout=120)
    ray.get(waiting, timeout=60)
    caught = False
except ray.exceptions.RayError:
    caught = True
ray.shutdown()
sys.exit(0 if caught else 1)
