# After preamble.py: OpenRLHF 0.5's own train(), with models that load at once.
import types

from openrlhf.cli import train_ppo_ray


@stub("the actors of a role, which load and save at once")  # noqa: F821 of preamble.py
class Models:
    # ``fit`` returns the result of its training.
    def __init__(self, *_, **__):
        pass

    def async_init_model_from_pretrained(self, *_):
        return []

    def async_fit_actor_model(self, *_, **__):
        return [Models.fit()]

    def async_save_model(self):
        return []


strategy = types.SimpleNamespace(print=print)
replace(train_ppo_ray, get_strategy=lambda _: strategy, PPORayActorGroup=Models)  # noqa: F821
sizes = {f"{role}_num_{what}": 1 for role in ("actor", "ref") for what in ("nodes", "gpus_per_node")}
args = types.SimpleNamespace(
    **sizes,
    colocate_actor_ref=True,
    colocate_critic_reward=False,
    critic_pretrain=None,
    pretrain="m",
    remote_rm_url=["r"],
    zero_stage=2,
    seed=0,
    max_len=64,
    vllm_num_engines=1,
    vllm_tensor_parallel_size=1,
    enable_prefix_caching=False,
    enforce_eager=True,
)
