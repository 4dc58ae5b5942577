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


def with_fewer_ranks(words: Sequence[str], run: Run) -> Iterator[list[str]]:
    """Yield ``words`` with fewer nodes for the roles of the trainer, most first.

    Each has as many engines as there are, then fewer; engines on the trainer's GPUs fill those that are left.
    Nothing if the trainer has one node, or if the release cannot load checkpoints of another number of ranks.
    """
    if run.flat or run.tensor_parallel > 1 or not run.zero.stage:
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
