"""The specification of an OpenRLHF run, in one form for all releases, from its parsed arguments."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rlhf_stack import sync
from rlhf_stack.errors import UserError
from rlhf_stack.inputs.text import shortened
from rlhf_stack.memory import Zero
from rlhf_stack.openrlhf.request import DIGITS, request_of, upstream_order
from rlhf_stack.placement.model import ENGINES, Group, PlacementError, Request

ACTOR, REF, CRITIC, REWARD = "actor", "ref", "critic", "reward"
PPO, SFT, DPO = "train_ppo_ray", "train_sft", "train_dpo"
MUON = "muon"
VLLM_0_4_UTILIZATION = 0.9  # vLLM's default; OpenRLHF 0.5 has no flag for it


@dataclass(frozen=True)
class Role:
    """A model of the trainer: ``ranks`` processes on the GPUs of the group ``group``.

    ``value_head``: a scalar for each token instead of logits. ``offloaded``: the weights stay on the host.
    """

    name: str
    group: str
    ranks: int
    model: str
    trained: bool
    value_head: bool
    offloaded: bool = False


@dataclass(frozen=True)
class Run:
    """A run as requested.

    ``release`` is OpenRLHF's. ``order`` is that in which upstream creates its groups. ``length`` is the
    tokens of prompt and answer. ``train_batch`` and ``rollout_batch`` are sequences per GPU at a time;
    ``tokens`` and ``rollout_tokens`` replace them if batches are dynamic. ``batch`` is the sequences of an
    optimizer step. ``tensor_parallel`` ranks share each layer, ``ring`` ranks each sequence. ``answer``
    limits the tokens of an answer, None if only ``length`` does. ``quantized``: the linear layers of the
    trainer have 4 bits per weight. ``asynchronous``: engines generate while the trainer trains. ``program``
    is the module of OpenRLHF, whose batches have ``pairs`` sequences for each of the requested ones: two if
    chosen and rejected answers are compared. ``can_offload``: the installed DeepSpeed can run the optimiser
    on the CPU, ``has_fused_adam``: it has an Adam of its own on the GPU.
    ``sync_backend`` is that of the weight sync: nccl, gloo or auto. ``packed``: a row of the trainer has
    several samples. ``weight_decay`` is the largest of the trained roles. ``muon``: one of them has the
    optimiser Muon.
    """

    release: str
    roles: tuple[Role, ...]
    request: Request
    order: tuple[str, ...]
    zero: Zero
    length: int
    train_batch: int
    rollout_batch: int
    checkpointing: bool
    attention: str
    engine_model: str
    utilization: float
    batch: int = 128
    engine_sleeps: bool = False
    trainer_sleeps: bool = False
    tokens: int | None = None
    rollout_tokens: int | None = None
    tensor_parallel: int = 1
    ring: int = 1
    lora: int = 0
    ema: bool = False
    half_precision_logits: bool = False
    answer: int | None = None
    quantized: bool = False
    asynchronous: bool = False
    program: str = PPO
    pairs: int = 1
    can_offload: bool = True
    has_fused_adam: bool = True
    sync_backend: str = "nccl"
    packed: bool = False
    weight_decay: float = 0.0
    muon: bool = False

    @property
    def flat(self) -> bool:
        """Whether the flags have no sections, as before OpenRLHF 0.9."""
        return is_flat(self.release)

    @property
    def can_sleep(self) -> bool:
        """Whether the trainer may sleep: at ZeRO stage 3 DeepSpeed moves the state of its own Adam alone."""
        return self.zero.offload or (self.has_movable_state and (self.has_fused_adam or self.zero.stage < 3))

    @property
    def has_movable_state(self) -> bool:
        """Whether DeepSpeed's optimizer has ``offload_states``: of ZeRO, not those of 16 bits (0.19.6)."""
        return self.zero.stage > (1 if self.zero.fp32_gradients else 0)

    @property
    def obstacle_to_stage_3(self) -> str:
        """Why the run would end at its start with ZeRO stage 3; "" if it would not."""
        if self.tensor_parallel > 1 and not self.quantized:
            return (
                "transformers loads no weights for --ds.tensor_parallel_size > 1 (NotImplementedError): give "
                "--ds.zero_stage 2, or leave --ds.tensor_parallel_size out"
            )
        if self.muon:
            return (
                "DeepSpeed refuses Muon with the reduce-scatter that OpenRLHF requests for it: give "
                "--ds.zero_stage 2, or the optimiser adam"
            )
        return ""

    @property
    def rank_batch(self) -> int:
        """Sequences of a training step per GPU, for the trained role with the most ranks."""
        ranks = max(role.ranks for role in self.roles if role.trained)
        return max(1, self.batch * self.ring * self.tensor_parallel // ranks)

    def zero_of(self, role: Role) -> Zero:
        """Return how ZeRO shards the model of ``role``."""
        ranks = max(1, role.ranks // self.tensor_parallel)
        if role.trained:
            return replace(self.zero, ranks=ranks, shards=min(self.zero.shards, ranks))
        stage = self.zero.stage if self.zero.stage == 3 else 0
        return Zero(stage, ranks, offload_weights=role.offloaded and stage == 3)


def is_flat(release: str) -> bool:
    """Report whether the flags of this OpenRLHF have no sections."""
    found = re.match(r"([0-9]{1,4})\.([0-9]{1,4})", release)
    if not found:
        raise UserError(f"OpenRLHF {shortened(release, 40)!r}: not a version that is known")
    return (int(found[1]), int(found[2])) < (0, 9)


def run_of(release: str, values: Any) -> Run:
    """Return the run that the parsed arguments ``values`` of OpenRLHF ``release`` request.

    `command_line.parse` has checked their ranges. `UserError` if they contradict each other.
    """
    try:
        run = _flat(release, values) if is_flat(release) else _sections(release, values)
    except PlacementError as error:
        raise UserError(str(error)) from None
    _check_ranks(run)
    _check_stage(run)
    if run.trainer_sleeps and not run.zero.offload and not run.has_movable_state:
        gradients = " and --ds.grad_accum_dtype fp32" if run.zero.fp32_gradients else ""
        raise UserError(
            f"--ds.enable_sleep: with --ds.zero_stage {run.zero.stage}{gradients} DeepSpeed's optimizer "
            "cannot move its state to the host: give --ds.zero_stage 2, or leave --ds.enable_sleep out"
        )
    return run


def _check_stage(run: Run) -> None:
    if run.zero.stage == 3 and (obstacle := run.obstacle_to_stage_3):
        raise UserError(f"--ds.zero_stage 3: {obstacle}")


def _check_ranks(run: Run) -> None:
    """Raise `UserError` if ring attention, tensor parallelism or ZeRO++ does not divide a role's ranks."""
    together = run.ring * run.tensor_parallel
    for role in run.roles:
        if role.ranks % together:
            raise UserError(
                f"{role.name} has {role.ranks} ranks, which must be a multiple of {together}: ring attention "
                f"of {run.ring} times tensor parallelism of {run.tensor_parallel}"
            )

    for wrong in undivided(run):
        raise UserError(wrong)


def undivided(run: Run) -> Iterator[str]:
    """Yield a line for each trained role whose ranks DeepSpeed cannot divide into groups of ``--ds.zpg``."""
    for role in run.roles if run.zero.stage == 3 else ():
        group = min(run.zero.shards, role.ranks)  # as DeepSpeed does
        if role.trained and role.ranks % group:
            yield (
                f"{role.name} has {role.ranks} ranks, which must be a multiple of {group}: the group that "
                f"holds the weights a second time ({'--zpg' if run.flat else '--ds.zpg'})"
            )


def _sections(release: str, args: Any) -> Run:
    request, groups = request_of(args)
    models = {
        ACTOR: args.actor.model_name_or_path,
        REF: args.actor.model_name_or_path,
        CRITIC: args.critic.model_name_or_path,
        REWARD: args.reward.model_name_or_path,
    }
    offloaded = {REF: args.ref.offload, REWARD: args.reward.offload}
    roles = tuple(
        _role(name, group, getattr(args, name), str(models[name]), offloaded.get(name, False))
        for name, group in groups.items()
    )
    dynamic = args.train.dynamic_batch_enable
    return Run(
        release=release,
        roles=roles,
        request=request,
        order=tuple(upstream_order(args)),
        zero=Zero(
            args.ds.zero_stage,
            1,
            args.ds.adam_offload,
            fp32_gradients=args.ds.grad_accum_dtype == "fp32",
            overlap=args.ds.overlap_comm,
            shards=args.ds.zpg,
        ),
        length=args.data.max_len,
        train_batch=args.train.micro_batch_size,
        rollout_batch=args.rollout.micro_batch_size,
        tokens=args.train.max_tokens_per_gpu if dynamic else None,
        rollout_tokens=args.rollout.max_tokens_per_gpu if dynamic else None,
        checkpointing=args.actor.gradient_checkpointing_enable,
        attention=args.ds.attn_implementation,
        batch=args.train.batch_size,
        engine_model=str(args.actor.model_name_or_path),
        utilization=args.vllm.gpu_memory_utilization,
        engine_sleeps=args.vllm.enable_sleep,
        trainer_sleeps=args.ds.enable_sleep,
        tensor_parallel=args.ds.tensor_parallel_size,
        ring=args.ds.ring_attn_size,
        lora=args.ds.lora.rank,
        ema=args.train.enable_ema,
        answer=getattr(args.rollout, "max_new_tokens", None),
        quantized=getattr(args.ds, "load_in_4bit", False),
        asynchronous=args.train.async_enable,
        sync_backend=sync.requested_backend(args),
        packed=getattr(args.ds, "packing_samples", False) or dynamic,
        weight_decay=max(getattr(args, role.name).adam.weight_decay for role in roles if role.trained),
        muon=any(_has_muon(getattr(args, role.name)) for role in roles if role.trained),
    )


def _has_muon(section: Any) -> bool:
    """Report whether the arguments of a role, or of a trainer, request Muon: releases before 0.11 cannot."""
    return getattr(section, "optim", "adam") == MUON


def _role(name: str, group: str, own: Any, model: str, offloaded: bool) -> Role:
    ranks = own.num_nodes * own.num_gpus_per_node
    return Role(name, group, ranks, model, name in (ACTOR, CRITIC), name in (CRITIC, REWARD), offloaded)


def _flat(release: str, args: Any) -> Run:
    request, groups = request_of(args)
    rewards = [] if args.remote_rm_url else args.reward_pretrain.split(",")
    models = {ACTOR: args.pretrain, REF: args.pretrain, CRITIC: args.critic_pretrain}
    models |= {f"{REWARD}{index or ''}": model for index, model in enumerate(rewards)}
    roles = []
    for name, group in groups.items():
        kind = name.rstrip(DIGITS)
        ranks = getattr(args, f"{kind}_num_nodes") * getattr(args, f"{kind}_num_gpus_per_node")
        trained, value_head = kind in (ACTOR, CRITIC), kind in (CRITIC, REWARD)
        offloaded = args.ref_reward_offload and not trained
        roles.append(Role(name, group, ranks, str(models[name]), trained, value_head, offloaded))
    return Run(
        release=release,
        roles=tuple(roles),
        request=request,
        order=(*(group.name for group in request.groups), *([ENGINES] if request.engines else [])),
        zero=Zero(
            args.zero_stage,
            1,
            args.adam_offload,
            fp32_gradients=args.grad_accum_dtype in (None, "fp32"),
            shards=args.zpg,
        ),
        length=args.max_len or args.prompt_max_len + args.generate_max_len,
        train_batch=args.micro_train_batch_size,
        rollout_batch=args.micro_rollout_batch_size,
        checkpointing=args.gradient_checkpointing,
        attention="flash_attention_2" if args.flash_attn else "eager",
        batch=args.train_batch_size,
        engine_model=str(args.pretrain),
        utilization=VLLM_0_4_UTILIZATION,
        lora=args.lora_rank,
        ema=args.enable_ema,
        half_precision_logits=True,
        answer=None if args.max_len else args.generate_max_len,
        sync_backend=args.vllm_sync_backend,
        packed=getattr(args, "packing_samples", False),
        quantized=getattr(args, "load_in_4bit", False),
    )


def trainer_run(release: str, program: str, values: Any, nodes: int, gpus: int) -> Run:
    """Return the run of SFT, DPO or RM on ``nodes`` with ``gpus`` GPUs each; errors as those of `run_of`."""
    found = (
        _flat_trainer(release, program, values) if is_flat(release) else _trainer(release, program, values)
    )
    group = Group(ACTOR, nodes, gpus, strict_spread=True)
    roles = tuple(replace(role, ranks=group.size) for role in found.roles)
    run = replace(found, roles=roles, request=Request((group,)))
    _check_ranks(run)
    _check_stage(run)
    return run


def _trainer_roles(program: str, model: str, reference: str, offloaded: bool) -> tuple[Role, ...]:
    is_reward = program not in (SFT, DPO)
    trained = Role(REWARD if is_reward else ACTOR, ACTOR, 1, model, True, is_reward)
    return (
        (trained, Role(REF, ACTOR, 1, reference, False, False, offloaded)) if program == DPO else (trained,)
    )


def _trainer(release: str, program: str, args: Any) -> Run:
    model = str(args.model.model_name_or_path)
    own = getattr(args, "ref", None)
    reference = str(getattr(own, "model_name_or_path", None) or model)
    return Run(
        release=release,
        program=program,
        roles=_trainer_roles(program, model, reference, bool(getattr(own, "offload", False))),
        request=Request(),
        order=(ACTOR,),
        zero=Zero(
            args.ds.zero_stage,
            1,
            getattr(args.ds, "adam_offload", False),
            fp32_gradients=getattr(args.ds, "grad_accum_dtype", None) == "fp32",
            overlap=getattr(args.ds, "overlap_comm", False),
            shards=getattr(args.ds, "zpg", 1),
        ),
        length=args.data.max_len,
        train_batch=args.train.micro_batch_size,
        rollout_batch=args.train.micro_batch_size,
        checkpointing=args.model.gradient_checkpointing_enable,
        attention=args.ds.attn_implementation,
        engine_model=model,
        utilization=1.0,
        batch=args.train.batch_size,
        tensor_parallel=getattr(args.ds, "tensor_parallel_size", 1),
        ring=getattr(args.ds, "ring_attn_size", 1),
        lora=args.ds.lora.rank,
        quantized=getattr(args.ds, "load_in_4bit", False),
        packed=getattr(args.ds, "packing_samples", False),
        pairs=1 if program == SFT else 2,
        muon=_has_muon(args),
    )


def _flat_trainer(release: str, program: str, args: Any) -> Run:
    model = str(args.pretrain)
    reference = str(getattr(args, "ref_pretrain", None) or model)
    return Run(
        release=release,
        program=program,
        roles=_trainer_roles(program, model, reference, bool(getattr(args, "ref_offload", False))),
        request=Request(),
        order=(ACTOR,),
        zero=Zero(
            args.zero_stage,
            1,
            args.adam_offload,
            fp32_gradients=args.grad_accum_dtype in (None, "fp32"),
            shards=args.zpg,
        ),
        length=args.max_len,
        train_batch=args.micro_train_batch_size,
        rollout_batch=args.micro_train_batch_size,
        checkpointing=args.gradient_checkpointing,
        attention="flash_attention_2" if args.flash_attn else "eager",
        engine_model=model,
        utilization=1.0,
        batch=args.train_batch_size,
        ring=getattr(args, "ring_attn_size", 1),
        lora=args.lora_rank,
        half_precision_logits=True,
        quantized=getattr(args, "load_in_4bit", False),
        packed=getattr(args, "packing_samples", False),
        pairs=1 if program == SFT else 2,
    )
