"""Whether a run can go on a cluster: where everything lands, what each GPU and host needs, what is wrong."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlhf_stack.memory import KvCache, Shape
from rlhf_stack.openrlhf.run_spec import ACTOR, CRITIC, REF, REWARD, Run
from rlhf_stack.placement import FreeNode, PlacementError, Plan, plan
from rlhf_stack.planning.cluster_spec import GIB, Machine
from rlhf_stack.planning.memory_needs import CONTEXT, PROCESS, Need, engine_cache, needs
from rlhf_stack.planning.upstream_placement import UpstreamLayout, upstream_layout
from rlhf_stack.planning.upstream_placement_flat import upstream_layout_flat


@dataclass
class PlannedGpu:
    """A GPU with what is on it, such as "actor 0" or "engine 1", and the most bytes of each phase."""

    index: int
    holds: list[str] = field(default_factory=list)
    training: int = 0
    generating: int = 0

    @property
    def peak(self) -> int:
        """The most at any time."""
        return max(self.training, self.generating)


@dataclass
class PlannedNode:
    """A machine with its GPUs, and what this run needs of its host.

    ``memory_running`` and ``memory_loading`` are bytes of the host: while it runs, and until the weights of
    all ranks are on GPUs.
    """

    machine: Machine
    gpus: list[PlannedGpu]
    cpus_needed: float = 0.0
    memory_running: int = 0
    memory_loading: int = 0

    @property
    def memory_needed(self) -> int:
        """Bytes of the host, at most."""
        return max(self.memory_running, self.memory_loading)


@dataclass(frozen=True)
class Assessment:
    """All that is known of a run before it starts. ``problems`` is empty if it can go.

    ``ours`` is None where nothing could be placed.
    """

    run: Run
    nodes: list[PlannedNode]
    needs: dict[str, Need]
    engine: KvCache | None
    ours: Plan | None
    upstream: UpstreamLayout
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def gpus_needed(self) -> int:
        """GPUs in all; roles that share one count once."""
        return self.run.request.size


def assess(run: Run, machines: Sequence[Machine], shapes: Mapping[str, Shape]) -> Assessment:
    """Where ``run`` lands on ``machines``, and what is wrong with it; ``shapes`` by the model's name."""
    free = [machine.free for machine in machines]
    per_role = needs(run, shapes)
    smallest = min((machine.gpu_memory for machine in machines if machine.gpus), default=0)
    engine = engine_cache(run, shapes, smallest)
    problems = [*_mismatches(run), *_heads(run, shapes)]
    ours, upstream, refusal = _placed(run, free)
    nodes = [
        PlannedNode(machine, [PlannedGpu(index) for index in range(machine.gpus)]) for machine in machines
    ]
    if refusal:
        problems.append(refusal)
    if ours:
        _fill(run, nodes, ours, per_role, engine)
        problems += _too_small(nodes)
    if engine and smallest and not engine.fits:
        problems.append(
            f"an engine's cache has room for {engine.tokens} tokens and one sequence has {run.length}: of "
            f"{engine.budget / GIB:.1f} GiB of each GPU its weights take {engine.weights / GIB:.1f} and its "
            f"largest step {engine.working / GIB:.1f}"
        )
    notes = _notes(run, upstream, smallest, any(machine.memory for machine in machines))
    return Assessment(
        run,
        nodes,
        per_role,
        engine if smallest else None,
        ours,
        upstream,
        tuple(problems),
        tuple(notes),
    )


def _placed(run: Run, free: Sequence[FreeNode]) -> tuple[Plan | None, UpstreamLayout, str]:
    """What this distribution does, what upstream does, and why nothing can be placed, if so."""
    upstream = (
        upstream_layout_flat(free, run.request) if run.flat else upstream_layout(free, run.request, run.order)
    )
    try:
        return plan(free, run.request), upstream, ""
    except PlacementError as error:
        return None, upstream, str(error)


def _fill(
    run: Run, nodes: list[PlannedNode], placed: Plan, per_role: Mapping[str, Need], engine: KvCache | None
) -> None:
    """Put every rank and every worker on a GPU of its node, in order, and count what they need."""
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
            _count(run, gpu, loads.get(id(gpu), []), taken.get(id(gpu)))


def _count(run: Run, gpu: PlannedGpu, here: Sequence[Need], engine: KvCache | None) -> None:
    """Roles of one GPU hold what they have at the same time, and compute one after the other."""
    contexts = CONTEXT * (len(here) + (1 if engine else 0))
    budget = engine.budget if engine else 0
    awake = 0 if run.engine_sleeps else budget
    gpu.generating = CONTEXT * len(here) + budget + sum(need.asleep for need in here)
    if here:
        gpu.training = contexts + awake + sum(need.held for need in here)
        gpu.training += max(need.working for need in here)


def _too_small(nodes: Sequence[PlannedNode]) -> list[str]:
    """GPUs and hosts that need more than they have: one line for those that are alike."""
    found: dict[str, list[str]] = {}
    for node in nodes:
        memory = node.machine.gpu_memory
        for gpu in node.gpus:
            if memory and gpu.peak > memory:
                roles = ", ".join(dict.fromkeys(name.split()[0] for name in gpu.holds))
                phase = "training" if gpu.training >= gpu.generating else "generating"
                line = f"{gpu.peak / GIB:.1f} GiB of a GPU's {memory / GIB:.1f} while {phase} ({roles})"
                found.setdefault(line, []).append(f"{node.machine.address} GPU {gpu.index}")
        if node.machine.memory and node.memory_needed > node.machine.memory:
            line = f"{node.memory_needed / GIB:.0f} GiB of {node.machine.memory / GIB:.0f} of the host"
            found.setdefault(line, []).append(node.machine.address)
    return [f"not enough memory: {line}: {_few(where)}" for line, where in found.items()]


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _mismatches(run: Run) -> list[str]:
    """Roles that share GPUs and must be of one size, which upstream checks only when it has started."""
    ranks = {role.name: role for role in run.roles}
    found = []
    for one, other in ((ACTOR, REF), (CRITIC, REWARD)):
        together = {one, other} <= ranks.keys() and ranks[one].group == ranks[other].group == one
        if together and ranks[one].ranks != ranks[other].ranks:
            found.append(
                f"{one} and {other} share GPUs and have {ranks[one].ranks} and {ranks[other].ranks} ranks: "
                "give both the same number of nodes and of GPUs"
            )
    engines = run.request.engines
    if engines and engines.shares:
        size = next(group.size for group in run.request.groups if group.name == engines.shares)
        if engines.count * engines.size != size:
            found.append(
                f"{engines.count} engines of {engines.size} GPUs share the {size} GPUs of {engines.shares}, "
                "and must use all of them"
            )
    return found


def _heads(run: Run, shapes: Mapping[str, Shape]) -> list[str]:
    engines = run.request.engines
    shape = shapes[run.engine_model]
    if engines and shape.heads % engines.size:
        return [
            f"vLLM cannot split {shape.heads} heads among {engines.size} GPUs: take a size that divides them"
        ]
    return []


def _notes(run: Run, upstream: UpstreamLayout, gpu_memory: int, memory: bool) -> list[str]:
    found = []
    if not gpu_memory:
        found.append("the memory of a GPU is not known (--gpu-memory): whether it is enough was not judged")
    if not memory:
        found.append("the memory of the hosts is not known (--memory): whether it is enough was not judged")
    if upstream.pending:
        found.append(f"OpenRLHF as released would wait for ever for the GPUs of {upstream.pending}")
    if run.zero.stage != 3 and any(role.offloaded for role in run.roles):
        found.append("offloading the reference or reward model does nothing below ZeRO stage 3")
    if run.request.engines is None:
        found.append("no engines: the actor generates by itself, which was not counted")
    return found
