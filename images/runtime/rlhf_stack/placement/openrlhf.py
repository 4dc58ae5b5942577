"""What a run of OpenRLHF places, from its arguments."""

from typing import Any

from rlhf_stack.placement.cluster import reserve
from rlhf_stack.placement.model import ENGINES, Engines, Group, Request

CONTROLLER_CPUS = 1  # an actor without num_cpus needs one to be started, and holds none then


def reserve_run(args: Any) -> dict[str, Any]:
    """The placement groups of a run by the role that takes them; roles that share GPUs share a group."""
    request, roles = request_of(args)
    made = reserve(request)
    return made | {role: made[name] for role, name in roles.items()}


def request_of(args: Any) -> tuple[Request, dict[str, str]]:
    """What ``train_ppo_ray`` of OpenRLHF 0.11.2 asks for, and the group of each role, by ``args``."""
    train = args.train
    together = train.colocate_actor_ref or train.colocate_all
    has_critic, has_reward = bool(args.critic.model_name_or_path), not args.reward.remote_url
    roles = {"actor": "actor"}
    if args.algo.kl.init_coef > 0:
        roles["ref"] = "actor" if together else "ref"
    if has_critic and train.colocate_critic_reward:
        roles["critic"] = "critic"
    elif has_critic:
        roles["critic"] = "actor" if train.colocate_all else "critic"
    if has_reward:
        alone = "actor" if train.colocate_all else "reward"
        roles["reward"] = "critic" if has_critic and train.colocate_critic_reward else alone
    groups = tuple(_group(args, name) for name in dict.fromkeys(roles.values()))
    engines = None
    if args.vllm.num_engines:
        shares = "actor" if train.colocate_all and not train.async_enable else None
        engines = Engines(args.vllm.num_engines, args.vllm.tensor_parallel_size, shares)
    block = args.ds.ring_attn_size * args.ds.tensor_parallel_size
    return Request(groups, engines, block, CONTROLLER_CPUS), roles


def upstream_order(args: Any) -> list[str]:
    """In which order ``train_ppo_ray`` of OpenRLHF 0.11.2 as released makes its groups."""
    request, roles = request_of(args)
    first = ["actor"] if args.train.colocate_actor_ref or args.train.colocate_all else []
    engines = [ENGINES] if request.engines and not request.engines.shares else []
    return list(dict.fromkeys([*first, *engines, *roles.values()]))


def _group(args: Any, role: str) -> Group:
    own = getattr(args, role)
    return Group(role, own.num_nodes, own.num_gpus_per_node)
