"""Smaller command lines of a run, for a cluster that has lost nodes."""

from collections.abc import Iterator, Sequence

from rlhf_stack.openrlhf.run_spec import Run
from rlhf_stack.placement.model import Engines


def with_fewer_engines(words: Sequence[str], run: Run) -> Iterator[list[str]]:
    """Yield ``words`` with fewer engines, most first; nothing if engines share the trainer's GPUs."""
    engines = run.request.engines
    if engines is not None and not engines.shares:
        for count in range(engines.count - 1, 0, -1):
            yield _with_engines(words, count)


def why_no_fewer_engines(run: Run) -> str:
    """Return why `with_fewer_engines` yields nothing for ``run``, "" if it yields something."""
    engines = run.request.engines
    if engines is None:
        return "the run has no engines"
    if engines.shares:
        return "engines share the trainer's GPUs"
    return "" if engines.count > 1 else "the run has only one engine"


def why_no_fewer_ranks(run: Run) -> str:
    """Return why `with_fewer_ranks` yields nothing for ``run``, "" if it may yield something."""
    if run.flat:
        return f"OpenRLHF {run.release} loads no checkpoint of another number of ranks"
    if run.tensor_parallel > 1:
        return "a checkpoint of DeepSpeed's tensor parallelism is loaded by the same number of ranks only"
    if not run.zero.stage:
        return "with ZeRO stage 0 a checkpoint cannot be converted for another number of ranks"
    if run.zero.stage == 3 and run.weight_decay:
        # load_hp_checkpoint_state_from_checkpoint_dir_stage3 gives each group the values of the first one
        return "at ZeRO stage 3 another number of ranks would apply the weight decay to norms and biases too"
    if all(group.nodes == 1 for group in run.request.groups):
        return "the trainer has only one node"
    return ""


def changed_layout(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Return the numbers of nodes and engines that differ between two command lines of a run."""
    former = dict(_layout(before))
    return [
        f"{flag.removeprefix('--')} {former[flag]} to {value}"
        for flag, value in dict(_layout(after)).items()
        if flag in former and former[flag] != value
    ]


def _layout(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for index, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag.endswith(("num_engines", "num_nodes")) and (equals or index + 1 < len(words)):
            yield flag, value if equals else words[index + 1]


def with_fewer_ranks(words: Sequence[str], run: Run) -> Iterator[list[str]]:
    """Yield ``words`` with fewer nodes for the roles of the trainer, most first.

    Each has as many engines as there are, then fewer; engines on the trainer's GPUs fill those that are left.
    Nothing if the trainer has one node, or if the release cannot load checkpoints of another number of ranks.
    """
    if why_no_fewer_ranks(run):
        return
    nodes = {group.name: group.nodes for group in run.request.groups}
    of_role = {role.name: nodes[role.group] for role in run.roles}
    most = max(of_role.values(), default=1)
    for count in range(most - 1, 0, -1):
        changed = list(words)
        for role, own in of_role.items():
            if own > count:
                changed = _with_value(changed, f"--{role}.num_nodes", count)
        yield from _with_matching_engines(changed, run, count / most)


def _with_matching_engines(words: Sequence[str], run: Run, left: float) -> Iterator[list[str]]:
    """Yield ``words`` with the engines that suit a trainer of which the share ``left`` is left."""
    engines: Engines | None = run.request.engines
    if engines is None:
        yield list(words)
    elif not engines.shares:
        yield list(words)
        yield from with_fewer_engines(words, run)
    elif (engines.count * left).is_integer():
        yield _with_engines(words, int(engines.count * left))


def _with_engines(words: Sequence[str], count: int) -> list[str]:
    flat = any(word.partition("=")[0] == "--vllm_num_engines" for word in words)
    return _with_value(words, "--vllm_num_engines" if flat else "--vllm.num_engines", count)


def _with_value(words: Sequence[str], flag: str, value: int) -> list[str]:
    """Return ``words`` with another value wherever ``flag`` is."""
    changed = list(words)
    for index, word in enumerate(words):
        name, equals, _ = word.partition("=")
        if name == flag and equals:
            changed[index] = f"{flag}={value}"
        elif name == flag:
            changed[index + 1] = str(value)
    return changed
