"""Shows an assessment as terminal output and as JSON values."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rlhf_stack.planning.advice import Advice
from rlhf_stack.planning.assessment import Assessment, PlannedGpu, PlannedNode, spans
from rlhf_stack.planning.cluster_spec import GIB, Machine
from rlhf_stack.planning.memory_needs import Need

WIDTH = 24  # characters of a bar
SHOWN = 16  # maximum number of nodes in the output
COLOURS = {"actor": "green", "ref": "cyan", "critic": "magenta", "reward": "yellow", "engine": "blue"}


def print_assessment(
    console: Console, assessment: Assessment, advice: Sequence[Advice], layout: Advice | None
) -> None:
    """Print the assessment, the advice and the symmetric layout."""
    for node in assessment.nodes[:SHOWN]:
        console.print(_node(node))
    if len(assessment.nodes) > SHOWN:
        console.print(f"and {len(assessment.nodes) - SHOWN} more nodes (see --json)")
    console.print(_needs(assessment))
    console.print(_engine(assessment))
    for line in _summary(assessment):
        console.print(line)
    for note in assessment.notes:
        console.print(Text(f"note: {note}", style="dim"))
    for problem in assessment.problems:
        console.print(Text(f"problem: {problem}", style="bold red"))
    for one in advice:
        console.print(Text(f"try: {one}  ({one.reason})", style="yellow"))
    if layout and layout.run != assessment.run:
        console.print(Text(f"a layout identical on all nodes: {layout}  ({layout.reason})"))
    console.print(_verdict(assessment))


def _verdict(assessment: Assessment) -> Text:
    if assessment.problems:
        return Text("this run does not fit", style="bold red")
    if assessment.memory_checked:
        return Text("this run fits", style="bold green")
    return Text("this run can be placed; its memory was not checked (--gpu-memory)", style="bold yellow")


def print_machines(console: Console, machines: Sequence[Machine]) -> None:
    """Print machines without a run."""
    for machine in machines:
        console.print(_node(PlannedNode(machine, [PlannedGpu(index) for index in range(machine.gpus)])))
    total = sum(machine.gpus for machine in machines)
    console.print(f"nodes: {len(machines)}, GPUs: {total}")


def as_json(assessment: Assessment, advice: Sequence[Advice], layout: Advice | None) -> dict[str, Any]:
    """The assessment as JSON values; ``rlhf-stack plan --help`` explains them."""
    run = assessment.run
    return {
        "fits": not assessment.problems,
        "openrlhf": run.release,
        "gpus_needed": assessment.gpus_needed,
        "nodes": [_node_values(node) for node in assessment.nodes],
        "roles": [_need_values(assessment, need) for need in assessment.needs.values()],
        "engine": _engine_values(assessment),
        "memory_checked": assessment.memory_checked,
        "straddling": {
            "ours": _straddling(assessment.ours.engines if assessment.ours else (), assessment.least_span),
            "upstream": _straddling(assessment.upstream.engines, assessment.least_span),
            "upstream_waits_for": assessment.upstream.pending,
        },
        "problems": list(assessment.problems),
        "notes": list(assessment.notes),
        "advice": [_advice_values(one) for one in advice],
        "symmetric": _advice_values(layout) if layout else None,
    }


def _straddling(engines: Sequence[Sequence[int]], least: int) -> list[int]:
    """The indices of the engines that span more than ``least`` nodes."""
    return [index for index, span in enumerate(spans(engines)) if span > least]


def gib(size: float) -> str:
    """Format bytes in GiB."""
    return f"{size / GIB:.1f}"


def _node(node: PlannedNode) -> Panel:
    """A machine, with a line per GPU."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for gpu in node.gpus:
        table.add_row(f"GPU {gpu.index}", _holds(gpu), _bar(gpu, node.machine.gpu_memory))
    machine = node.machine
    title = f"{machine.address}: {len(node.gpus)} GPUs" + (f" {machine.gpu_type}" if machine.gpu_type else "")
    of = f" of {gib(machine.memory)}" if machine.memory else ""
    if not node.cpus_needed:
        host = f"{machine.cpus:g} CPUs, host memory {gib(machine.memory)} GiB"
    else:
        host = f"CPUs {node.cpus_needed:g} of {machine.cpus:g}, host memory {gib(node.memory_needed)}{of} GiB"
    return Panel(table, title=Text(title), title_align="left", subtitle=Text(host), subtitle_align="left")


def _holds(gpu: PlannedGpu) -> Text:
    text = Text()
    for name in gpu.holds:
        text.append(f"{name} ", style=COLOURS.get(name.split()[0].rstrip("0123456789"), ""))
    return text if gpu.holds else Text("free", style="dim")


def _bar(gpu: PlannedGpu, memory: int) -> Text:
    """A bar of the peak memory of a GPU."""
    if not gpu.holds:
        return Text("")
    if not memory:
        return Text(f"{gib(gpu.peak)} GiB")
    full = min(1.0, gpu.peak / memory)
    blocks = round(full * WIDTH)
    style = "red" if gpu.peak > memory else "green"
    bar = Text("█" * blocks, style=style)
    bar.append("░" * (WIDTH - blocks), style="dim")
    return bar.append(f" {gib(gpu.peak)} of {gib(memory)} GiB", style="")


def _needs(assessment: Assessment) -> Table:
    table = Table(title="GiB for each rank", title_justify="left")
    names = ("role", "ranks", "size", "weights", "grads", "optim", "activ", "buffer", "host")
    for name in names:
        table.add_column(name, justify="left" if name == "role" else "right")
    ranks = {role.name: role.ranks for role in assessment.run.roles}
    for need in assessment.needs.values():
        sizes = (need.weights, need.gradients, need.optimizer, need.activations, max(need.buffers, need.step))
        table.add_row(
            need.role, str(ranks[need.role]), _count(need.parameters), *map(gib, sizes), gib(need.host)
        )
    return table


def _count(parameters: int) -> str:
    """Format a number of parameters."""
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"


def _engine(assessment: Assessment) -> Group | Text:
    engines, cache = assessment.run.request.engines, assessment.engine
    if engines is None or cache is None:
        return Text("")
    where = f" on the GPUs of {engines.shares}" if engines.shares else ""
    lines = [
        f"{engines.count} engines of {engines.size} GPUs{where}, {gib(cache.budget)} GiB of each GPU "
        f"(utilization {assessment.run.utilization:g}): weights {gib(cache.weights)}, largest step "
        f"{gib(cache.working)}, cache {gib(cache.cache)}",
        f"{cache.tokens} tokens in the cache: {cache.concurrency:.1f} sequences of {assessment.run.length}",
    ]
    return Group(*(Text(line) for line in lines))


def _summary(assessment: Assessment) -> list[Text]:
    available = sum(len(node.gpus) for node in assessment.nodes)
    lines = [Text(f"{assessment.gpus_needed} GPUs needed, {available} available")]
    if assessment.ours and assessment.ours.engines:
        least = assessment.least_span
        upstream = _spanned(assessment.upstream.engines, least)
        ours = _spanned(assessment.ours.engines, least)
        lines.append(Text(f"OpenRLHF as released: {upstream}; placed by rlhf_stack: {ours}"))
    return lines


def _spanned(engines: Sequence[Sequence[int]], least: int) -> str:
    """How engines are placed, ``least`` nodes being needed: comparable between two placements."""
    if not engines:
        return "not placed"
    found = spans(engines)
    if len(found) == 1:
        needed = "needs to" if found[0] == least else f"needs {least}"
        return (
            "the engine is on one node" if found[0] == 1 else f"the engine spans {found[0]} nodes ({needed})"
        )
    if least == 1:
        return f"{sum(span > 1 for span in found)} of {len(found)} engines straddle nodes"
    if max(found) == least:
        return f"each of {len(found)} engines spans {least} nodes (needs to)"
    more = sum(span > least for span in found)
    verb = "spans" if more == 1 else "span"
    return f"{more} of {len(found)} engines {verb} up to {max(found)} nodes, {least} are needed"


def _node_values(node: PlannedNode) -> dict[str, Any]:
    machine = node.machine
    return {
        "address": machine.address,
        "cpus": machine.cpus,
        "cpus_needed": node.cpus_needed,
        "memory": machine.memory,
        "memory_running": node.memory_running,
        "memory_loading": node.memory_loading,
        "memory_saving": node.memory_saving,
        "gpu_memory": machine.gpu_memory,
        "gpu_type": machine.gpu_type,
        "gpus": [asdict(gpu) for gpu in node.gpus],
    }


def _need_values(assessment: Assessment, need: Need) -> dict[str, Any]:
    ranks = {role.name: role.ranks for role in assessment.run.roles}
    return asdict(need) | {"ranks": ranks[need.role]}


def _engine_values(assessment: Assessment) -> dict[str, Any] | None:
    engines = assessment.run.request.engines
    if engines is None:
        return None
    found: dict[str, Any] = {"count": engines.count, "size": engines.size, "shares": engines.shares}
    return found | {"cache": asdict(assessment.engine) if assessment.engine else None}


def _advice_values(advice: Advice) -> dict[str, Any]:
    return {"flags": list(advice.flags), "reason": advice.reason}
