"""Assesses whether a run fits a cluster: its placement, the memory of each GPU and host, and problems."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rlhf_stack.config import env_vars
from rlhf_stack.inputs.text import first_names
from rlhf_stack.memory import KvCache, Shape, reload_memory, sync_memory
from rlhf_stack.memory.training import BYTES_16BIT
from rlhf_stack.openrlhf.run_spec import ACTOR, CRITIC, PPO, Role, Run, undivided
from rlhf_stack.placement import FreeNode, PlacementError, Plan, Request, plan
from rlhf_stack.planning import attention
from rlhf_stack.planning.cluster_spec import GIB, Machine
from rlhf_stack.planning.memory_needs import CONTEXT, PROCESS, Need, engine_cache, needs
from rlhf_stack.planning.upstream_placement import UpstreamLayout, upstream_layout
from rlhf_stack.planning.upstream_placement_flat import upstream_layout_flat
from rlhf_stack.sync import sources

ALLOW_LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
# The part of a GPU that trainer and engine leave free if they share it: for CUDA graphs of a sleeping engine,
# gaps between allocations, and what CUDA does not give of the size that nvidia-smi reports.
SPARE = 0.03


@dataclass
class PlannedGpu:
    """A GPU, what it ``holds``, such as "actor 0" or "engine 1", and the peak bytes of each phase."""

    index: int
    holds: list[str] = field(default_factory=list)
    training: int = 0
    generating: int = 0
    syncing: int = 0

    @property
    def peak(self) -> int:
        """Peak bytes of all phases."""
        return max(self.training, self.generating, self.syncing)


@dataclass
class PlannedNode:
    """A machine with its GPUs and the host resources that the run needs.

    ``memory_running`` and ``memory_loading`` are bytes of host memory: during the run, and while the weights
    are loaded. ``memory_saving`` is added to the former while the model is saved.
    """

    machine: Machine
    gpus: list[PlannedGpu]
    cpus_needed: float = 0.0
    memory_running: int = 0
    memory_loading: int = 0
    memory_saving: int = 0

    @property
    def memory_needed(self) -> int:
        """Peak bytes of host memory."""
        return max(self.memory_running + self.memory_saving, self.memory_loading)


@dataclass(frozen=True)
class Assessment:
    """The assessment of a run before it starts; ``problems`` is empty if it fits.

    ``ours`` is the placement of this distribution; if there is none it is None, and ``refusal``, which
    ``problems`` contains, has the reason. ``upstream`` is the placement of OpenRLHF. ``contradictions`` are
    the problems that the run has on any cluster.
    """

    run: Run
    nodes: list[PlannedNode]
    needs: dict[str, Need]
    engine: KvCache | None
    ours: Plan | None
    upstream: UpstreamLayout
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    refusal: str = ""
    contradictions: tuple[str, ...] = ()

    @property
    def gpus_needed(self) -> int:
        """The number of GPUs that the run needs."""
        return self.run.request.size

    @property
    def memory_checked(self) -> bool:
        """Whether the memory of the GPUs is known; otherwise only the placement was checked."""
        return all(node.machine.gpu_memory for node in self.nodes if node.gpus)

    @property
    def least_span(self) -> int:
        """The number of nodes that an engine needs at least; 1 without engines."""
        engines = self.run.request.engines
        largest = max((node.machine.gpus for node in self.nodes), default=0)
        return -(-engines.size // largest) if engines and largest else 1


def spans(engines: Sequence[Sequence[int]]) -> list[int]:
    """The number of nodes that each engine spans; ``engines`` has the node of each worker."""
    return [len(set(nodes)) for nodes in engines]


def assess(
    run: Run,
    machines: Sequence[Machine],
    shapes: Mapping[str, Shape],
    variables: Mapping[str, str] = os.environ,
) -> Assessment:
    """Assess ``run`` on ``machines``; ``shapes`` by the name of the model, ``variables`` those of the run."""
    free = [machine.free for machine in machines]
    per_role = needs(run, shapes)
    contradictions = [*_mismatches(run), *_mismatches_of_engines(run, shapes), *_quantized(run)]
    contradictions += attention.obstacles(run, shapes)
    contradictions += _too_long(run, shapes[run.engine_model], variables)
    contradictions += _other_rotation(run, shapes[run.engine_model])
    problems = list(contradictions)
    allow_straddle = env_vars.flag(env_vars.ALLOW_STRADDLE, variables)
    ours, upstream, refusal = _placed(run, free, shapes, allow_straddle)
    smallest = min((machine.gpu_memory for machine in machines if machine.gpus), default=0)
    of_engines = {machines[index].gpu_memory for places in (ours.engines if ours else ()) for index in places}
    size = min(of_engines, default=smallest)
    engine = engine_cache(run, shapes, size)
    nodes = [
        PlannedNode(machine, [PlannedGpu(index) for index in range(machine.gpus)]) for machine in machines
    ]
    if refusal:
        problems.append(refusal)
    if ours:
        _fill(run, nodes, ours, per_role, engine)
        unmapped = engine.cache if engine and run.engine_sleeps else 0  # a sync wakes up the weights alone
        _add_sync(nodes, _sync_size(run, shapes[run.engine_model], variables) - unmapped)
        if env_vars.sync_sparse(variables) == "on":
            senders = _senders(run, ours, env_vars.sync_sources(variables))
            _add_kept(nodes, ours, senders, BYTES_16BIT * shapes[run.engine_model].total)
        problems += _too_small(nodes)
    if engine and size and not engine.fits:
        problems.append(
            f"an engine's KV cache has room for {engine.tokens} tokens, but one sequence has {run.length}: "
            f"of {engine.budget / GIB:.1f} GiB per GPU, the weights need {engine.weights / GIB:.1f} and the "
            f"largest step {engine.working / GIB:.1f}"
        )
    notes = _notes(run, upstream, smallest, any(machine.memory for machine in machines))
    notes += _different_gpus(machines)
    notes += [
        f"{name} is estimated to have {shape.total / 1e9:.2f}B parameters, by its dimensions: its family, or "
        f"its vision part, is not known (--model {name}=...,parameters:N gives the number)"
        for name, shape in shapes.items()
        if shape.estimated
    ]
    return Assessment(
        run=run,
        nodes=nodes,
        needs=per_role,
        engine=engine if size else None,
        ours=ours,
        upstream=upstream,
        problems=tuple(problems),
        notes=tuple(notes),
        refusal=refusal,
        contradictions=tuple(contradictions),
    )


def _placed(
    run: Run, free: Sequence[FreeNode], shapes: Mapping[str, Shape], allow_straddle: bool
) -> tuple[Plan | None, UpstreamLayout, str]:
    """The placement of this distribution, that of upstream, and the error if the run cannot be placed."""
    upstream = (
        upstream_layout_flat(free, run.request) if run.flat else upstream_layout(free, run.request, run.order)
    )

    def suits(request: Request) -> bool:
        return not _mismatches_of_engines(replace(run, request=request), shapes)

    try:
        return plan(free, run.request, allow_straddle, suits), upstream, ""
    except PlacementError as error:
        return None, upstream, str(error)


def _fill(
    run: Run, nodes: list[PlannedNode], placed: Plan, per_role: Mapping[str, Need], engine: KvCache | None
) -> None:
    """Assign every rank and worker to a GPU of its node, in order, and add up their memory."""
    waiting = {index: iter(node.gpus) for index, node in enumerate(nodes)}
    slots = {
        name: [(index, next(waiting[index])) for index in bundles]
        for name, bundles in placed.bundles.items()
        if name in {group.name for group in run.request.groups}
    }
    loads: dict[int, list[Need]] = {}
    for role in run.roles:
        for rank, (index, gpu) in enumerate(slots[role.group][: role.ranks]):
            gpu.holds.append(f"{role.name} {rank}")
            loads.setdefault(id(gpu), []).append(per_role[role.name])
            nodes[index].memory_running += per_role[role.name].host
            nodes[index].memory_loading += PROCESS + per_role[role.name].loading
            nodes[index].memory_saving += _saved(run, role, rank) * per_role[role.name].parameters
    engines = run.request.engines
    taken: dict[int, KvCache] = {}
    for number, of_engine in enumerate(placed.engines):
        for worker, index in enumerate(of_engine):
            if engines and engines.shares:
                index, gpu = slots[engines.shares][number * engines.size + worker]  # noqa: PLW2901
            else:
                gpu = next(waiting[index])
            gpu.holds.append(f"engine {number}")
            nodes[index].memory_running += PROCESS
            nodes[index].memory_loading += PROCESS
            if engine:
                taken[id(gpu)] = engine
                nodes[index].memory_running += engine.weights if run.engine_sleeps else 0
    for node in nodes:
        used = [gpu for gpu in node.gpus if gpu.holds]
        node.cpus_needed = float(len(used))
        for gpu in used:
            spare = int(SPARE * node.machine.gpu_memory)
            _count(run, gpu, loads.get(id(gpu), []), taken.get(id(gpu)), spare)


def _saved(run: Run, role: Role, rank: int) -> int:
    """Bytes per parameter that a rank holds on its host while OpenRLHF saves the model: all weights, or 0.

    Rank 0 gathers them; releases with sections copy unsharded ones on every rank. The critic is not saved
    without ``--critic.save_value_network``.
    """
    if not role.trained or role.name == CRITIC:
        return 0
    gathers = run.flat or run.zero.stage == 3 or run.tensor_parallel > 1
    return 0 if gathers and rank else BYTES_16BIT


def _count(run: Run, gpu: PlannedGpu, roles: Sequence[Need], engine: KvCache | None, spare: int) -> None:
    """Compute the peak of a GPU: its roles hold memory at the same time, but compute sequentially.

    Exceptions in training: actor and critic train at once, or, if they sleep, hold their states in turn. The
    budget of an engine excludes its context, for which one alone has room: no step runs in a sync, its peak.
    """
    fixed = CONTEXT * len(roles) + (CONTEXT + spare if roles and engine else 0)
    budget = engine.budget if engine else 0
    awake = 0 if run.engine_sleeps else budget
    asleep = sum(need.asleep for need in roles)
    gpu.generating = fixed + budget + asleep
    if roles and run.trainer_sleeps:
        gpu.training = fixed + awake + asleep
        gpu.training += max(need.held - need.asleep + need.working for need in roles)
    elif roles:
        at_once = sum(need.working for need in roles if need.role in (ACTOR, CRITIC))
        gpu.training = fixed + awake + sum(need.held for need in roles)
        gpu.training += max(at_once, *(need.working for need in roles))


def _sync_size(run: Run, shape: Shape, variables: Mapping[str, str]) -> int:
    """Bytes of a sync on a GPU of an engine; the flat releases have vLLM 0.4, which reloads no layers."""
    bucket, engines = env_vars.sync_bucket(variables), run.request.engines
    reloaded = 0 if run.flat or engines is None else reload_memory(shape, engines.size, bucket)
    return sync_memory(shape, bucket) + reloaded


def _add_sync(nodes: Sequence[PlannedNode], size: int) -> None:
    """Add the ``size`` bytes of a sync to the GPUs of engines; of shared ones the trainer has the buckets.

    It is negative if what a sync needs is less than what an engine has unmapped.
    """
    for gpu in (gpu for node in nodes for gpu in node.gpus):
        if any(name.startswith("engine") for name in gpu.holds):
            gpu.syncing = gpu.generating + size


def _add_kept(nodes: Sequence[PlannedNode], placed: Plan, senders: Sequence[int], size: int) -> None:
    """Add the ``size`` bytes that each node of engines keeps, and on other nodes the shares of ``senders``.

    A sender on a node of engines uses the memory of these.
    """
    of_engines = {index for engine in placed.engines for index in engine}
    if not of_engines:
        return
    for index in of_engines:
        nodes[index].memory_running += size
    for index, count in Counter(senders).items():
        if index not in of_engines:
            nodes[index].memory_running += -(-size * count // len(senders))


def _senders(run: Run, placed: Plan, number: int | None) -> list[int]:
    """The node of each of ``number`` ranks that send; the flat releases have one such rank."""
    ranks = next(role.ranks for role in run.roles if role.name == ACTOR)
    of_ranks = placed.bundles[ACTOR][:ranks]
    if run.flat or (number is not None and number > ranks):  # a sync refuses more senders than ranks
        return [of_ranks[0]]
    return [of_ranks[rank] for rank in sources.select([str(node) for node in of_ranks], number)]


def _too_small(nodes: Sequence[PlannedNode]) -> list[str]:
    """A line for each kind of GPU or host without enough memory."""
    found: dict[str, list[str]] = {}
    for node in nodes:
        memory = node.machine.gpu_memory
        for gpu in node.gpus:
            if memory and gpu.peak > memory:
                roles = ", ".join(dict.fromkeys(name.split()[0] for name in gpu.holds))
                phases = {
                    "training": gpu.training,
                    "generating": gpu.generating,
                    "receiving weights": gpu.syncing,
                }
                phase = max(phases, key=phases.__getitem__)
                line = f"{gpu.peak / GIB:.1f} GiB of a GPU's {memory / GIB:.1f} while {phase} ({roles})"
                found.setdefault(line, []).append(f"{node.machine.address} GPU {gpu.index}")
        if node.machine.memory and node.memory_needed > node.machine.memory:
            line = f"{node.memory_needed / GIB:.0f} GiB of {node.machine.memory / GIB:.0f} of the host"
            found.setdefault(line, []).append(node.machine.address)
    return [f"not enough memory: {line}: {first_names(where)}" for line, where in found.items()]


def _mismatches(run: Run) -> list[str]:
    """Check the ranks of each role, of which DeepSpeed complains only after the start."""
    found = list(undivided(run))
    for name, step in batch_steps(run).items():
        if run.batch % step:
            found.append(
                f"DeepSpeed refuses a batch of {run.batch}: it must be a multiple of {step}, the micro batch "
                f"of {run.train_batch} on all data-parallel ranks of {name}"
            )
    return found


def batch_steps(run: Run) -> dict[str, int]:
    """Sequences of a micro batch on all ranks, which must divide the batch, of each role that needs it.

    OpenRLHF gives DeepSpeed both numbers for every model but one that is trained with dynamic batches.
    """
    return {
        role.name: _micro_batches(run, role)
        for role in run.roles
        if not role.trained or run.tokens is None or (role.name == ACTOR and run.ema)
    }


def _micro_batches(run: Run, role: Role) -> int:
    ring = 1 if run.flat and not role.trained else run.ring  # of which 0.5.1 takes no account there
    return max(1, run.train_batch * role.ranks // (ring * run.tensor_parallel))


def _mismatches_of_engines(run: Run, shapes: Mapping[str, Shape]) -> list[str]:
    """Check the number and the size of the engines."""
    engines, shape, found = run.request.engines, shapes[run.engine_model], []
    if engines and engines.shares:
        size = next(group.size for group in run.request.groups if group.name == engines.shares)
        if engines.count * engines.size != size:
            found.append(
                f"{engines.count} engines of {engines.size} GPUs share the {size} GPUs of {engines.shares}, "
                "but must use all of them"
            )
    if engines and shape.heads % engines.size:
        found.append(
            f"vLLM cannot split {shape.heads} heads over {engines.size} GPUs: use a size that divides them"
        )
    elif engines and not shape.latent and shape.kv_heads % engines.size and engines.size % shape.kv_heads:
        found.append(
            f"vLLM can neither split {shape.kv_heads} KV heads over {engines.size} GPUs nor give each GPU "
            "one: use a size that divides them, or a multiple of them"
        )
    return found


def _too_long(run: Run, shape: Shape, variables: Mapping[str, str]) -> list[str]:
    """A line if vLLM refuses the length of the run; before OpenRLHF 0.9 it has no variable that allows it."""
    allowed = not run.flat and variables.get(ALLOW_LONG, "").strip().lower() in ("1", "true")
    if run.request.engines is None or not shape.max_length or run.length <= shape.max_length or allowed:
        return []
    flags = "--prompt_max_len and --generate_max_len" if run.flat else "--data.max_len"
    return [
        f"vLLM refuses sequences of {run.length} tokens: the model has at most {shape.max_length} "
        f"(max_position_embeddings): lower {flags}"
        + ("" if run.flat else f", or set {ALLOW_LONG}=1 (submit: --env)")
    ]


def _other_rotation(run: Run, shape: Shape) -> list[str]:
    """A line if vLLM 0.4.2, the one of OpenRLHF before 0.9, refuses the model's rotary embeddings."""
    if run.request.engines is None or not run.flat or not shape.rotary:
        return []
    return [f"{run.engine_model} has {shape.rotary}"]


def _quantized(run: Run) -> list[str]:
    if not run.quantized or run.lora:
        return []
    if run.request.engines is None:
        return ["weights of 4 bits cannot be trained: use LoRA with them (a rank above 0)"]
    return [
        "weights of 4 bits cannot be trained, and with LoRA they cannot be merged for engines: leave "
        f"{'--load_in_4bit' if run.flat else '--ds.load_in_4bit'} out"
    ]


def _different_gpus(machines: Sequence[Machine]) -> list[str]:
    """A note if the nodes have GPUs of several types or sizes."""
    kinds = Counter(
        " ".join(filter(None, [one.gpu_type, f"{one.gpu_memory / GIB:.0f} GiB" if one.gpu_memory else ""]))
        for one in machines
        if one.gpus
    )
    if len(kinds) < 2:
        return []
    shown = ", ".join(f"{count} with {kind or 'unknown ones'}" for kind, count in kinds.most_common())
    return [
        f"nodes have different GPUs ({shown}): engines are sized for the smallest that they use, and "
        "wait for the slowest"
    ]


def _notes(run: Run, upstream: UpstreamLayout, gpu_memory: int, memory: bool) -> list[str]:
    found = []
    if not gpu_memory:
        found.append("GPU memory was not checked: its size is unknown (--gpu-memory)")
    if not memory:
        found.append("host memory was not checked: its size is unknown (--memory)")
    if upstream.pending and run.program == PPO:
        found.append(f"OpenRLHF as released would wait without a deadline for the GPUs of {upstream.pending}")
    if run.zero.stage != 3 and any(role.offloaded for role in run.roles):
        found.append("offloading the reference or reward model has no effect below ZeRO stage 3")
    if run.answer is not None and run.answer > run.length:
        found.append(
            f"sequences end at {run.length} tokens with their prompt: a limit of {run.answer} for the answer "
            "has no effect"
        )
    if run.request.engines is None and run.program == PPO:
        found.append("no engines: the actor itself generates, and its memory for that was not counted")
    return found
