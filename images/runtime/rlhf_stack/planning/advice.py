"""Finds changes with which a run fits, one alone or several together, and a layout identical on all nodes."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rlhf_stack.memory import Shape
from rlhf_stack.openrlhf.run_spec import ACTOR, CRITIC, PPO, REF, REWARD, Run
from rlhf_stack.placement.model import Engines, Group
from rlhf_stack.planning.assessment import Assessment, assess, batch_steps
from rlhf_stack.planning.cluster_spec import Machine

LOWEST_UTILIZATION = 0.3
WITHOUT = "without "  # before a flag that must be left out
STEP = 0.05
MOST_SYMMETRIC = 512  # nodes: a search among all layouts of more takes minutes
SHORTEST = 512  # tokens: no shorter length is advised

FLAGS = {  # of each setting: before OpenRLHF 0.9, and from 0.9 on
    "all": ("", "--train.colocate_all"),
    "actor_ref": ("--colocate_actor_ref", "--train.colocate_actor_ref"),
    "critic_reward": ("--colocate_critic_reward", "--train.colocate_critic_reward"),
    "quantized": ("--load_in_4bit", "--ds.load_in_4bit"),
    "batch": ("--train_batch_size", "--train.batch_size"),
    "checkpointing": ("--gradient_checkpointing", "--actor.gradient_checkpointing_enable"),
    "train_batch": ("--micro_train_batch_size", "--train.micro_batch_size"),
    "rollout_batch": ("--micro_rollout_batch_size", "--rollout.micro_batch_size"),
    "stage": ("--zero_stage", "--ds.zero_stage"),
    "offload": ("--adam_offload", "--ds.adam_offload"),
    "engine_sleeps": ("", "--vllm.enable_sleep"),
    "trainer_sleeps": ("", "--ds.enable_sleep"),
    "utilization": ("", "--vllm.gpu_memory_utilization"),
    "engine_size": ("--vllm_tensor_parallel_size", "--vllm.tensor_parallel_size"),
    "engine_count": ("--vllm_num_engines", "--vllm.num_engines"),
    "tokens": ("", "--train.max_tokens_per_gpu"),
    "rollout_tokens": ("", "--rollout.max_tokens_per_gpu"),
    "length": ("--generate_max_len", "--data.max_len"),
    "total_length": ("--max_len", "--data.max_len"),
    "answer": ("", "--rollout.max_new_tokens"),
    "role_offload": ("--ref_reward_offload", "--ref.offload"),
    "sync": ("--vllm_sync_backend", "--vllm.sync_backend"),
    "attention": ("--flash_attn", "--ds.attn_implementation"),
    "nodes": ("--{}_num_nodes", "--{}.num_nodes"),
    "gpus": ("--{}_num_gpus_per_node", "--{}.num_gpus_per_node"),
}


OF_PPO = ("rollout_batch", "rollout_tokens", "answer", "trainer_sleeps")  # settings that no other program has


Change = tuple[tuple[str, ...], str, Run]  # flags, their effect, and the changed run


@dataclass(frozen=True)
class Advice:
    """Flags to add or replace, their effect, and the run with them; ``enough``: that run fits."""

    flags: tuple[str, ...]
    reason: str
    run: Run
    enough: bool

    def __str__(self) -> str:
        """The flags to add or replace, and then those to leave out."""
        given = " ".join(text for text in self.flags if not text.startswith(WITHOUT))
        left_out = " and ".join(text for text in self.flags if text.startswith(WITHOUT))
        return ", and ".join(filter(None, [given, left_out]))


def flag(run: Run, name: str, *values: object) -> str:
    """The flag of the run's OpenRLHF for the setting ``name``, with its values; empty if there is none."""
    text = FLAGS[name][0 if run.flat else 1]
    if run.program != PPO:
        text = "" if name in OF_PPO else text.replace("--actor.", "--model.").replace("ref_reward", "ref")
    return " ".join([text, *map(str, values)]) if text else ""


def advise(found: Assessment, machines: Sequence[Machine], shapes: Mapping[str, Shape]) -> list[Advice]:
    """Changes with which the run of ``found`` fits: single ones if any suffices, else one combination.

    Empty if the run already fits, or if no known change suffices.
    """
    if not found.problems:
        return []

    def judged(change: Change) -> Advice:
        flags, reason, changed = change
        return Advice(flags, reason, changed, not assess(changed, machines, shapes).problems)

    hybrid = list(map(judged, _hybrid(found.run))) if found.refusal else []
    alone = [*map(judged, _changes(found.run)), *hybrid]
    if enough := [advice for advice in alone if advice.enough]:
        return enough
    for start in (Advice((), "", found.run, False), *hybrid):
        if more := _together(start, machines, shapes):
            return more
    return []


def symmetric_layout(run: Run, machines: Sequence[Machine], shapes: Mapping[str, Shape]) -> Advice | None:
    """The layout closest to the request in which every node has the same ranks and engines.

    None if the nodes differ or are more than `MOST_SYMMETRIC`, if engines share the trainer's GPUs, or if no
    such layout fits.
    """
    engines = run.request.engines
    sizes = {(machine.gpus, machine.cpus, machine.gpu_memory) for machine in machines}
    if engines is None or engines.shares or len(sizes) != 1 or not machines[0].gpus:
        return None
    if len(machines) > MOST_SYMMETRIC:
        return None
    count, gpus = len(machines), machines[0].gpus
    groups = run.request.groups
    wanted = [*(group.size / count for group in groups), engines.count * engines.size / count]
    for parts in sorted(_splits(gpus, len(groups), engines.size), key=lambda parts: _distance(parts, wanted)):
        changed = _resized(run, count, parts)
        found = assess(changed, machines, shapes)
        if not found.problems and _is_even(found):
            named = [f"{part} for {group.name}" for part, group in zip(parts, groups, strict=False)]
            text = f"on each of {count} nodes: {', '.join(named)} and {parts[-1]} GPUs for engines"
            return Advice(_layout_flags(changed), text, changed, True)
    return None


def _is_even(found: Assessment) -> bool:
    """Whether every node has the same number of ranks and workers of each kind."""
    kinds = [sorted(name.split()[0] for gpu in node.gpus for name in gpu.holds) for node in found.nodes]
    return all(kind == kinds[0] for kind in kinds)


def _together(start: Advice, machines: Sequence[Machine], shapes: Mapping[str, Shape]) -> list[Advice]:
    """Add changes to ``start`` one by one, keeping those that reduce the excess, until the run fits."""
    run, flags, reasons = start.run, dict.fromkeys(start.flags), [start.reason] * bool(start.reason)
    peak = _excess(assess(run, machines, shapes))
    for _ in range(len(FLAGS)):
        for more, reason, changed in _changes(run):
            after = assess(changed, machines, shapes)
            if _excess(after) < peak:
                run, peak = changed, _excess(after)
                flags |= dict.fromkeys(more)
                reasons.append(reason)
                if not after.problems:
                    return [Advice(_last(flags), "; ".join(dict.fromkeys(reasons)), run, True)]
                break
        else:
            return []
    return []


def _excess(found: Assessment) -> tuple[int, int, int]:
    """How far a run is from fitting: GPUs that it lacks, contradictions, and bytes missing."""
    free = sum(int(node.machine.free.gpus) for node in found.nodes)
    lacking = max(1, found.gpus_needed - free) if found.refusal else 0
    return lacking, len(found.contradictions), _bytes_missing(found)


def _bytes_missing(found: Assessment) -> int:
    """The bytes missing on GPUs and hosts, and in caches that cannot hold one sequence."""
    missing = sum(
        max(0, gpu.peak - node.machine.gpu_memory)
        for node in found.nodes
        for gpu in node.gpus
        if node.machine.gpu_memory
    )
    missing += sum(
        max(0, node.memory_needed - node.machine.memory) for node in found.nodes if node.machine.memory
    )
    if found.engine and not found.engine.fits:
        missing += int(found.engine.weights * (1 - found.engine.concurrency))
    return missing


def _last(flags: Mapping[str, None]) -> tuple[str, ...]:
    """The flags, with the last value of each, and no flag both set and left out."""
    return tuple({text.removeprefix(WITHOUT).split()[0]: text for text in flags}.values())


def _changes(run: Run) -> Iterator[Change]:
    """Changes of one setting, ordered by cost."""

    def change(name: str, reason: str, changed: Run, *values: object) -> Iterator[Change]:
        if text := flag(run, name, *values):
            yield (text,), reason, changed

    yield from _sharing(run)
    shared = run.request.engines is not None and run.request.engines.shares is not None
    if shared and not run.engine_sleeps:
        reason = "engines release their memory while the trainer computes"
        yield from change("engine_sleeps", reason, replace(run, engine_sleeps=True))
    if shared and not run.trainer_sleeps and not run.zero.offload and run.can_sleep:
        reason = "the trainer moves its optimiser to the host while engines generate"
        yield from change("trainer_sleeps", reason, replace(run, trainer_sleeps=True))
    if not run.checkpointing:
        reason = "activations are recomputed in the backward pass instead of saved: about a third more time"
        yield from change("checkpointing", reason, replace(run, checkpointing=True))
    if run.train_batch > 1 and run.tokens is None:
        half = run.train_batch // 2
        yield from change("train_batch", "fewer sequences at a time", replace(run, train_batch=half), half)
    if run.rollout_batch > 1 and run.rollout_tokens is None:
        half = run.rollout_batch // 2
        reason = "fewer sequences at a time in the rollout"
        yield from change("rollout_batch", reason, replace(run, rollout_batch=half), half)
    if run.tokens is not None and run.tokens > run.length:
        half = max(run.length, run.tokens // 2)
        yield from change("tokens", "fewer tokens at a time in training", replace(run, tokens=half), half)
    if run.rollout_tokens is not None and run.rollout_tokens > run.length:
        half = max(run.length, run.rollout_tokens // 2)
        reason = "fewer tokens at a time in the rollout"
        yield from change("rollout_tokens", reason, replace(run, rollout_tokens=half), half)
    sharded = replace(run, zero=replace(run.zero, stage=3))
    possible = not run.obstacle_to_stage_3 and (sharded.can_sleep or not run.trainer_sleeps)
    if run.zero.stage < 3 and possible:
        reason = "weights are sharded over the ranks and gathered layer by layer"
        yield from change("stage", reason, sharded, 3)
    if run.can_offload and not run.zero.offload:
        reason = "the optimiser runs on the host: slower steps and more host memory"
        yield from change("offload", reason, replace(run, zero=replace(run.zero, offload=True)))
    if run.request.engines is not None and run.utilization - STEP >= LOWEST_UTILIZATION:
        less = round(run.utilization - STEP, 2)
        reason = "a smaller KV cache leaves more memory to the trainer, or for a sync"
        yield from change("utilization", reason, replace(run, utilization=less), less)
    yield from _engine_changes(run)
    yield from _host_changes(run)
    yield from _repairs(run)
    yield from _shorter(run)


def _sharing(run: Run) -> Iterator[Change]:
    """Two roles on the same GPUs."""
    for setting, one, other in (("actor_ref", ACTOR, REF), ("critic_reward", CRITIC, REWARD)):
        if together := _colocated(run, one, other):
            yield (flag(run, setting),), f"{one} and {other} share GPUs", together


def _hybrid(run: Run) -> Iterator[Change]:
    """All roles and the engines on the GPUs of the actor, where trainer and engines sleep alternately."""
    engines, actor = run.request.engines, run.request.groups[0]
    if run.flat or run.asynchronous or engines is None or engines.shares or actor.name != ACTOR:
        return
    sizes = {(group.nodes, group.gpus_per_node) for group in run.request.groups}
    if len(sizes) > 1 or any(role.ranks != actor.size for role in run.roles) or actor.size % engines.size:
        return
    shared = replace(engines, count=actor.size // engines.size, shares=ACTOR)
    flags = [flag(run, "all"), flag(run, "engine_sleeps")]
    if shared.count != engines.count:
        flags.append(flag(run, "engine_count", shared.count))
    sleeps = not run.zero.offload and run.can_sleep
    if sleeps:
        flags.append(flag(run, "trainer_sleeps"))
    if any(role.name == REWARD and role.group == CRITIC for role in run.roles):
        flags.append(WITHOUT + flag(run, "critic_reward"))
    changed = replace(
        run,
        request=replace(run.request, groups=(actor,), engines=shared),
        roles=tuple(replace(role, group=ACTOR) for role in run.roles),
        order=(ACTOR,),
        engine_sleeps=True,
        trainer_sleeps=run.trainer_sleeps or sleeps,
    )
    yield tuple(flags), "trainer and engines share GPUs, and use them alternately", changed


def _repairs(run: Run) -> Iterator[Change]:
    """Settings without which the run is refused on any cluster."""
    if (batch := _accepted_batch(run)) != run.batch:
        reason = "DeepSpeed accepts multiples of the micro batch on all ranks"
        yield (flag(run, "batch", batch),), reason, replace(run, batch=batch)
    if run.quantized and not run.lora:
        reason = "weights of 4 bits cannot be trained"
        yield (WITHOUT + flag(run, "quantized"),), reason, replace(run, quantized=False)


def _colocated(run: Run, one: str, other: str) -> Run | None:
    """The run with two roles on the GPUs of the first, None unless both have equal groups of their own."""
    groups = {group.name: group for group in run.request.groups}
    has_second = f"{other}1" in groups  # a further reward model, which cannot share
    if not {one, other} <= groups.keys() or has_second:
        return None
    if groups[one].nodes != groups[other].nodes or groups[one].gpus_per_node != groups[other].gpus_per_node:
        return None
    kept = tuple(
        replace(group, strict_spread=run.flat or group.strict_spread) if group.name == one else group
        for group in run.request.groups
        if group.name != other
    )
    roles = tuple(replace(role, group=one) if role.name == other else role for role in run.roles)
    order = [name for name in run.order if name != other]
    if not run.flat and one == ACTOR:  # which is then created before the engines
        order = [ACTOR, *(name for name in order if name != ACTOR)]
    return replace(run, request=replace(run.request, groups=kept), roles=roles, order=tuple(order))


def _accepted_batch(run: Run) -> int:
    """The batch nearest to the requested one that DeepSpeed accepts."""
    step = math.lcm(*batch_steps(run).values())
    return max(step, round(run.batch / step) * step)


def _host_changes(run: Run) -> Iterator[Change]:
    """Less host memory: nothing is moved to the host."""
    if run.zero.offload:
        reason = "the optimiser stays on the GPUs: less host memory, more GPU memory"
        yield (WITHOUT + flag(run, "offload"),), reason, replace(run, zero=replace(run.zero, offload=False))
    if run.trainer_sleeps:
        reason = "the optimiser stays on the GPUs while engines generate: less host memory"
        yield (WITHOUT + flag(run, "trainer_sleeps"),), reason, replace(run, trainer_sleeps=False)
    if any(role.offloaded for role in run.roles):
        roles = tuple(replace(role, offloaded=False) for role in run.roles)
        names = {role.name.rstrip("0123456789") for role in run.roles if role.offloaded}
        flags = (
            [flag(run, "role_offload")]
            if run.flat
            else [flag(run, "role_offload").replace("ref", name) for name in sorted(names)]
        )
        reason = "models that are not trained stay on the GPUs: less host memory"
        yield tuple(WITHOUT + text for text in flags), reason, replace(run, roles=roles)


def _shorter(run: Run) -> Iterator[Change]:
    """Half the length; a limit of the answer that would be longer is lowered too."""
    half = run.length // 2
    if half < SHORTEST:
        return
    if run.flat and run.answer is not None:  # its length is that of the prompt and of the answer
        answer = run.answer // 2
        text = flag(run, "length", answer)
        yield (text,), "shorter answers", replace(run, length=run.length - run.answer + answer, answer=answer)
        return
    flags = [flag(run, "total_length", half)]
    if run.answer is not None and run.answer >= half:
        flags.append(flag(run, "answer", half // 2))
        run = replace(run, answer=half // 2)
    yield tuple(flags), "shorter sequences", replace(run, length=half)


def _engine_changes(run: Run) -> Iterator[Change]:
    """Half as many engines, each over twice the GPUs."""
    engines = run.request.engines
    if engines and engines.count % 2 == 0:
        wider = replace(engines, count=engines.count // 2, size=engines.size * 2)
        flags = (flag(run, "engine_size", wider.size), flag(run, "engine_count", wider.count))
        changed = replace(run, request=replace(run.request, engines=wider))
        yield flags, "half as many engines, each over twice the GPUs", changed


def _splits(gpus: int, groups: int, size: int) -> Iterator[tuple[int, ...]]:
    """All divisions of a node: at least one GPU per group, the rest for engines of ``size`` GPUs."""
    for parts in itertools.product(range(1, gpus + 1), repeat=groups):
        rest = gpus - sum(parts)
        if rest > 0 and rest % size == 0:
            yield (*parts, rest)


def _distance(parts: Sequence[int], wanted: Sequence[float]) -> tuple[float, tuple[int, ...]]:
    return sum(abs(part - goal) for part, goal in zip(parts, wanted, strict=True)), tuple(parts)


def _resized(run: Run, nodes: int, parts: Sequence[int]) -> Run:
    groups = tuple(
        Group(group.name, nodes, part) for group, part in zip(run.request.groups, parts, strict=False)
    )
    engines = run.request.engines
    resized = engines and Engines(nodes * parts[-1] // engines.size, engines.size)
    ranks = {group.name: group.size for group in groups}
    roles = tuple(replace(role, ranks=ranks[role.group]) for role in run.roles)
    return replace(run, request=replace(run.request, groups=groups, engines=resized), roles=roles)


def _layout_flags(run: Run) -> tuple[str, ...]:
    """The flags for the layout of ``run``; roles of a group have the size of the group."""
    sizes = {group.name: group for group in run.request.groups}
    found: dict[str, None] = {}
    for role in run.roles:
        kind, group = role.name.rstrip("0123456789"), sizes[role.group]
        found[flag(run, "nodes", group.nodes).format(kind)] = None
        found[flag(run, "gpus", group.gpus_per_node).format(kind)] = None
    if run.request.engines:
        found[flag(run, "engine_count", run.request.engines.count)] = None
    return tuple(found)
