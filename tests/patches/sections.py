# After preamble.py: OpenRLHF 0.11's own train(), with a trainer and models that are ready and saved at once.
import types

import ray
from openrlhf.cli import train_ppo_ray

own_ray(num_cpus=4, num_gpus=2)  # noqa: F821 of preamble.py
READY = ray.put(1)


def some(**given):
    return types.SimpleNamespace(**given)


@stub("the actors of a role, which load and save at once")  # noqa: F821
class Models:
    loaded = READY

    def __init__(self, *_, **__):
        pass

    def async_init_model_from_pretrained(self, *_):
        return [self.loaded]

    def async_save_model(self):
        return [READY]


replace(train_ppo_ray, get_strategy=lambda _: some(print=print), RayActorGroup=Models)  # noqa: F821
ready = stub("a call of the trainer's actor", remote=lambda: READY)  # noqa: F821
trainer = stub("the trainer", remote=lambda *_, **__: some(get_max_steps=ready, fit=ready))  # noqa: F821
replace_module("openrlhf.trainer.ppo_trainer", PPOTrainer=trainer)  # noqa: F821
none = some(num_nodes=1, num_gpus_per_node=1, model_name_or_path=None, remote_url="r")
args = some(
    train=some(
        colocate_actor_ref=False,
        colocate_all=False,
        colocate_critic_reward=False,
        async_enable=False,
        seed=0,
        full_determinism_enable=False,
        agent_func_path=None,
    ),
    actor=some(num_nodes=1, num_gpus_per_node=1, model_name_or_path="m"),
    ref=none,
    critic=none,
    reward=none,
    algo=some(kl=some(init_coef=0), advantage=some(is_correction_level="off")),
    vllm=some(
        num_engines=1,
        tensor_parallel_size=1,
        enable_prefix_caching=False,
        enforce_eager=True,
        gpu_memory_utilization=0.5,
        enable_sleep=True,
    ),
    ds=some(ring_attn_size=1, tensor_parallel_size=1),
    data=some(max_len=64),
    rollout=some(max_new_tokens=8, temperature=1, top_p=1),
)
