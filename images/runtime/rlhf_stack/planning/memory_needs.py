"""Estimates the memory of each role of a run, per rank on its GPU and on its host."""

from collections.abc import Mapping
from dataclasses import dataclass

from rlhf_stack.memory import (
    BATCHED,
    EngineSettings,
    KvCache,
    Pass,
    Shape,
    forward_peak,
    kv_cache,
    model_states,
    training_peak,
)
from rlhf_stack.memory.training import BUCKET, BYTES_16BIT, BYTES_32BIT, shard_size
from rlhf_stack.openrlhf.run_spec import ACTOR, Role, Run
from rlhf_stack.planning.cluster_spec import GIB

CONTEXT = GIB  # of a CUDA process: context, kernels, NCCL buffers (nccl#1685: 1.06 GB); assumed, not measured
NF4_BYTES = (
    4 + 8 / 64 + 32 / 64 / 256
) / 8  # per weight: a scale of 8 bits for 64, one of 32 bits for 256 of these
PROCESS = 2 * GIB  # host memory of a process that imported torch; assumed, not measured


@dataclass(frozen=True)
class Need:
    """The bytes that one rank of a role needs, and the number of ``parameters`` of its model.

    ``activations`` and ``buffers`` exist during a pass, ``step`` during an optimiser step. ``asleep`` is held
    on the GPU while the role does not train; ``host`` and ``loading`` are on the host, ``loading`` only until
    the weights are on the GPU. At ZeRO stage 3 every rank then has the experts of all layers.
    """

    role: str
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    step: int
    asleep: int
    host: int
    loading: int

    @property
    def held(self) -> int:
        """Bytes held while the role is awake."""
        return self.weights + self.gradients + self.optimizer

    @property
    def working(self) -> int:
        """Further bytes needed while the role computes."""
        return max(self.activations + self.buffers, self.step)


def need(run: Run, role: Role, shape: Shape) -> Need:
    """The memory of one rank of ``role``, whose model has ``shape``."""
    parameters = shape.value_head_params if role.value_head else shape.total
    own = shard_size(parameters, run.tensor_parallel)
    trained = _trained(run, role, shape, own)
    zero = run.zero_of(role)
    block = 0 if run.flat else shape.expert_block  # transformers 4 has a parameter for each expert
    stacked = min(own, shape.layers * block)
    found = model_states(own, zero, trained, block)
    stored = quantized_bytes(shape, parameters) if run.quantized else BYTES_16BIT * parameters
    weights, host = found.weights * stored // (BYTES_16BIT * parameters), found.host
    if role.name == ACTOR and run.ema:
        copy = BYTES_16BIT * (shard_size(own, zero.ranks) if zero.stage == 3 else own)
        exact = BYTES_32BIT * (shard_size(trained, zero.ranks) if zero.stage == 3 else trained)
        weights, host = (weights, host + copy) if zero.stage == 3 else (weights + copy, host)
        host += exact  # of `rlhf_stack.openrlhf.moving_average`
    moves = run.trainer_sleeps and role.trained and not zero.offload  # OpenRLHF skips an offloaded optimiser
    sleeping = found.optimizer + found.gradients if moves else 0
    # DeepSpeed allocates ZeRO-3's bucket once, and frees it only where it moves the state.
    bucket = BYTES_16BIT * BUCKET if trained and zero.stage == 3 and not moves else 0
    return Need(
        role=role.name,
        parameters=parameters,
        weights=weights,
        gradients=found.gradients,
        optimizer=found.optimizer,
        activations=_activations(run, role, shape),
        buffers=found.buffers,
        step=found.step,
        asleep=weights + found.gradients + found.optimizer - sleeping + bucket,
        host=PROCESS + host + sleeping,
        loading=BYTES_16BIT * (shard_size(own, zero.ranks) + stacked if zero.stage == 3 else own),
    )


def quantized_bytes(shape: Shape, parameters: int) -> int:
    """Bytes of ``parameters`` with linear layers in NF4 with double quantisation, the rest in 16 bits."""
    heads = min(parameters, shape.embedding * (1 if shape.tied else 2))
    return int(BYTES_16BIT * heads + NF4_BYTES * (parameters - heads))


def needs(run: Run, shapes: Mapping[str, Shape]) -> dict[str, Need]:
    """The memory per rank of each role, by role name; ``shapes`` by the name of the model."""
    return {role.name: need(run, role, shapes[role.model]) for role in run.roles}


def engine_cache(run: Run, shapes: Mapping[str, Shape], gpu_memory: int) -> KvCache | None:
    """The KV cache of an engine of the run on GPUs of ``gpu_memory`` bytes; None without engines."""
    engines = run.request.engines
    if engines is None:
        return None
    step = max(BATCHED, run.length) if run.flat else BATCHED  # vLLM 0.4 computes a prompt at once
    settings = EngineSettings(engines.size, run.utilization, run.length, step=step)
    return kv_cache(shapes[run.engine_model], settings, gpu_memory)


def _trained(run: Run, role: Role, shape: Shape, own: int) -> int:
    """The trained parameters of a rank: all, none, or the LoRA adapters of every linear layer.

    For experts in one parameter, of transformers 5, PEFT doubles the rank of gate and up together.
    """
    if not role.trained:
        return 0
    if not run.lora:
        return own
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sides = 2 * (shape.hidden + queries) + 2 * (shape.hidden + keys)
    outer = 5 if shape.experts and not run.flat else 3
    sides += (3 * shape.hidden + outer * shape.intermediate) * max(1, shape.experts)
    return shard_size(run.lora * sides * shape.layers, run.tensor_parallel)


def _activations(run: Run, role: Role, shape: Shape) -> int:
    rollout = _pass(run, role, run.rollout_batch, _rollout_tokens(run))
    inference = forward_peak(shape, rollout)
    if not role.trained:
        return inference
    return max(inference, training_peak(shape, _pass(run, role, run.train_batch, run.tokens)))


def _rollout_tokens(run: Run) -> int | None:
    """The tokens of the largest micro batch of a dynamic rollout, None if it is not dynamic.

    OpenRLHF rounds the number of micro batches down to a multiple of the actor's data-parallel ranks: with 8
    ranks, 15 micro batches become 8.
    """
    if run.rollout_tokens is None:
        return None
    actor = next(role for role in run.roles if role.name == ACTOR)
    ranks = max(1, actor.ranks // (run.ring * run.tensor_parallel))
    return run.rollout_tokens * (2 * ranks - 1) // ranks


def _pass(run: Run, role: Role, sequences: int, tokens: int | None) -> Pass:
    together = run.ring * run.tensor_parallel  # by which OpenRLHF multiplies the limit of a GPU
    length = run.length if tokens is None else max(run.length, tokens * together)
    return Pass(
        sequences=sequences * run.pairs if tokens is None else 1,
        length=length,
        checkpointing=run.checkpointing and role.trained,
        attention=run.attention,
        split=run.ring,
        value_head=role.value_head,
        half_precision_logits=run.half_precision_logits,
    )
