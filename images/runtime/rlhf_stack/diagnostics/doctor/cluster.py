"""The facts of every node of the Ray cluster that this machine is part of, each asked by a task, with a
deadline."""

import contextlib
import time
from typing import Any

from rlhf_stack.cluster.connect import connected
from rlhf_stack.diagnostics.doctor import collect
from rlhf_stack.diagnostics.doctor.facts import Answer


def ask(address: str, timeout: float) -> list[Answer]:
    """What each living node says within ``timeout`` seconds; a node that is silent has no `Node`.

    `UserError` if the cluster at ``address`` does not answer.
    """
    import ray

    deadline = time.monotonic() + timeout
    with connected(address):
        nodes = {entry["NodeID"]: entry["NodeManagerAddress"] for entry in ray.nodes() if entry["Alive"]}
        starts = _round_trips(nodes, deadline)
        answers = _wait({_on(node, _facts): node for node in nodes}, deadline)
    return [
        Answer(address, answers.get(node), *starts.get(node, (0.0, 0.0))) for node, address in nodes.items()
    ]


def _round_trips(nodes: dict[str, str], deadline: float) -> dict[str, tuple[float, float]]:
    """For each node how far its clock is ahead of ours, and how far that may be wrong: half of the way.

    The second task of a worker is timed: the first one waits until the worker has started.
    """
    _wait({_on(node, _now): node for node in nodes}, deadline)
    found = {}
    for node in nodes:
        before = time.time()
        told = _wait({_on(node, _now): node}, deadline)
        after = time.time()
        if node in told:
            found[node] = (told[node] - (before + after) / 2, (after - before) / 2)
    return found


def _facts() -> Any:
    return collect.node()


def _now() -> float:
    return time.time()


def _on(node: str, function: Any) -> Any:
    """A task on one node that takes none of its resources."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote = ray.remote(num_cpus=0, max_retries=0)(function)
    return remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()


def _wait(tasks: dict[Any, str], deadline: float) -> dict[str, Any]:
    """What came back until the deadline, by node; a task that failed is as one that is silent."""
    import ray

    done, _ = ray.wait(list(tasks), num_returns=len(tasks), timeout=max(0.0, deadline - time.monotonic()))
    found = {}
    for task in done:
        with contextlib.suppress(ray.exceptions.RayError):
            found[tasks[task]] = ray.get(task)
    return found
