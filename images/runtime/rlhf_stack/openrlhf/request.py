"""The placement request of an OpenRLHF run, from its arguments."""

import math
from typing import Any

from rlhf_stack import sync
from rlhf_stack.errors import UserError
from rlhf_stack.placement.model import ENGINES, Engines, Group, PlacementError, Request

DIGITS = "0123456789"  # suffix of a second reward model
CONTROLLER_CPUS = 1  # an actor without num_cpus needs one to start, and holds none afterwards


def request_of(args: Any) -> tuple[Request, dict[str, str]]:
    """Return the request of ``train_ppo_ray`` and the group of each role (OpenRLHF 0.11 or 0.5).

    `UserError` if engines could not load the run's weights, in its dtype or with its LoRA adapters, or if the
    sizes of roles do not suit the GPUs that they share.
    """
    if obstacle := sync.lora_obstacle(args):
        raise UserError(f"LoRA does not work with {obstacle}")
    if getattr(getattr(args, "ds", None), "param_dtype", "bf16") != "bf16" and args.vllm.num_engines:
        raise UserError(
            f"--ds.param_dtype {args.ds.param_dtype}: OpenRLHF starts its engines in bfloat16, which load no "
            "weights of another dtype; use bf16"
        )
    request, roles = _flat(args) if hasattr(args, "actor_num_nodes") else _sections(args)
    _check_shared(args, roles)
    return request, roles


def _check_shared(args: Any, roles: dict[str, str]) -> None:
    """Raise `UserError` where OpenRLHF asserts equal sizes after its start, or would run out of bundles.

    It also compares the critic with a reward model that the run does not have.
    """
    pairs = [("actor", "ref")] if roles.get("ref") == "actor" else []
    if "critic" in roles and getattr(args, "train", args).colocate_critic_reward:
        pairs.append(("critic", "reward"))
    for pair in pairs:
        sizes = ["{} x {}".format(*_size(args, role)) for role in pair]
        if sizes[0] != sizes[1]:
            raise UserError(
                f"{' and '.join(pair)} share GPUs but have {' and '.join(sizes)} GPUs: "
                "give both the same number of nodes, and of GPUs on each"
            )
    for role, group in roles.items():
        ranks, gpus = (math.prod(_size(args, name)) for name in (role, group))
        if ranks > gpus:
            raise UserError(
                f"{role} has {ranks} ranks but shares the {gpus} GPUs of {group}: give it at most {gpus}"
            )


def _size(args: Any, role: str) -> tuple[int, int]:
    """The number of nodes of ``role``, and of its GPUs on each."""
    if not hasattr(args, "actor_num_nodes"):
        own = getattr(args, role)
        return own.num_nodes, own.num_gpus_per_node
    kind = role.rstrip(DIGITS)
    return getattr(args, f"{kind}_num_nodes"), getattr(args, f"{kind}_num_gpus_per_node")


def _sections(args: Any) -> tuple[Request, dict[str, str]]:
    """Return the request of OpenRLHF 0.11, which packs a group on any nodes."""
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
    groups = tuple(Group(name, *_size(args, name)) for name in dict.fromkeys(roles.values()))
    engines = None
    if args.vllm.num_engines:
        shares = "actor" if train.colocate_all and not train.async_enable else None
        engines = Engines(args.vllm.num_engines, args.vllm.tensor_parallel_size, shares)
    tp_sp_size = args.ds.ring_attn_size * args.ds.tensor_parallel_size
    return Request(groups, engines, tp_sp_size, CONTROLLER_CPUS), roles


def _flat(args: Any) -> tuple[Request, dict[str, str]]:
    """Return the request of OpenRLHF 0.5, which spreads a group over as many nodes as its flags name.

    Exception: Ray places the ranks of an unshared role with one GPU per node anywhere. The two roles of a
    pair share each GPU by 0.75 and 0.25.
    """
    roles = {"actor": "actor", "ref": "actor" if args.colocate_actor_ref else "ref"}
    rewards = [] if args.remote_rm_url else args.reward_pretrain.split(",")
    pair = bool(args.critic_pretrain and args.colocate_critic_reward)
    if pair and len(rewards) > 1:
        raise PlacementError(
            f"--colocate_critic_reward allows one reward model on each GPU, and {len(rewards)} are "
            "requested: leave it out"
        )
    if args.critic_pretrain:
        roles["critic"] = "critic"
    for index in range(len(rewards)):
        name = f"reward{index or ''}"
        roles[name] = "critic" if pair else name
    shared = {"actor"} if args.colocate_actor_ref else set()
    shared |= {"critic"} if pair else set()
    groups = []
    for name in dict.fromkeys(roles.values()):
        nodes, gpus = _size(args, name)
        groups.append(Group(name, nodes, gpus, strict_spread=gpus > 1 or name in shared))
    engines = None
    if args.vllm_num_engines:
        engines = Engines(args.vllm_num_engines, args.vllm_tensor_parallel_size)
    spare = CONTROLLER_CPUS if args.remote_rm_url else 0  # a Ray task calls it
    return Request(tuple(groups), engines, spare_cpus=spare), roles


def upstream_order(args: Any) -> list[str]:
    """Return the order in which ``train_ppo_ray`` of pristine OpenRLHF 0.11.2 creates its groups."""
    request, roles = request_of(args)
    first = ["actor"] if args.train.colocate_actor_ref or args.train.colocate_all else []
    engines = [ENGINES] if request.engines and not request.engines.shares else []
    return list(dict.fromkeys([*first, *engines, *roles.values()]))
