"""Collects the facts of every node of this machine's Ray cluster by one task per node, with a deadline."""

import contextlib
import time
from typing import Any

from rlhf_stack.cluster.connect import connected
from rlhf_stack.diagnostics.doctor import collect
from rlhf_stack.diagnostics.doctor.facts import NodeAnswer


def collect_from_nodes(address: str, timeout: float) -> list[NodeAnswer]:
    """Collect the facts of each live node in ``timeout`` seconds; an unresponsive node has ``node`` None.

    `UserError` if the cluster at ``address`` does not respond.
    """
    import ray

    deadline = time.monotonic() + timeout
    with connected(address):
        nodes = {entry["NodeID"]: entry["NodeManagerAddress"] for entry in ray.nodes() if entry["Alive"]}
        offsets = _clock_offsets(nodes, deadline)
        facts = _wait({_start_task(node, _facts): node for node in nodes}, deadline)
    return [
        NodeAnswer(address, facts.get(node), *offsets.get(node, (0.0, 0.0)))
        for node, address in nodes.items()
    ]


def _clock_offsets(nodes: dict[str, str], deadline: float) -> dict[str, tuple[float, float]]:
    """For each node, the offset of its clock from ours and its error, half of the round trip, in seconds.

    The second task of a worker is timed, because the first includes the start of the worker.
    """
    _wait({_start_task(node, _now): node for node in nodes}, deadline)
    found = {}
    for node in nodes:
        before = time.time()
        remote = _wait({_start_task(node, _now): node}, deadline)
        after = time.time()
        if node in remote:
            found[node] = (remote[node] - (before + after) / 2, (after - before) / 2)
    return found


def _facts() -> Any:
    return collect.collect_facts()


def _now() -> float:
    return time.time()


def _start_task(node: str, function: Any) -> Any:
    """Start a task on a node that uses none of its resources."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote = ray.remote(num_cpus=0, max_retries=0)(function)
    return remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()


def _wait(tasks: dict[Any, str], deadline: float) -> dict[str, Any]:
    """The results until the deadline, by node; failed tasks are omitted."""
    import ray

    done, _ = ray.wait(list(tasks), num_returns=len(tasks), timeout=max(0.0, deadline - time.monotonic()))
    found = {}
    for task in done:
        with contextlib.suppress(ray.exceptions.RayError):
            found[tasks[task]] = ray.get(task)
    return found
