"""Collects the facts of every node of this machine's Ray cluster by one task per node, with a deadline."""

import contextlib
import time
from collections.abc import Sequence
from typing import Any

from rlhf_stack.cluster.connect import connected
from rlhf_stack.diagnostics.doctor import collect
from rlhf_stack.diagnostics.doctor.facts import NodeAnswer
from rlhf_stack.lazy import ray

CLOCKS = 0.25  # of the time, kept for the clocks of the nodes that responded
AT_ONCE = 32  # more tasks at once would measure their own queue


def collect_from_nodes(address: str, timeout: float) -> list[NodeAnswer]:
    """Collect the facts of each live node in ``timeout`` seconds; an unresponsive node has ``node`` None.

    `UserError` if the cluster at ``address`` does not respond.
    """
    deadline = time.monotonic() + timeout
    with connected(address):
        nodes = {entry["NodeID"]: entry["NodeManagerAddress"] for entry in ray.nodes() if entry["Alive"]}
        facts = _wait({_start_task(node, _facts): node for node in nodes}, deadline - CLOCKS * timeout)
        offsets = _clock_offsets(list(facts), deadline)
    return [
        NodeAnswer(address, facts.get(node), *offsets.get(node, (0.0, 0.0)))
        for node, address in nodes.items()
    ]


def _clock_offsets(nodes: Sequence[str], deadline: float) -> dict[str, tuple[float, float]]:
    """For each node, the offset of its clock from ours and its error, half of the round trip, in seconds.

    The nodes have already run a task, because the first one includes the start of a worker.
    """
    found = {}
    for first in range(0, len(nodes), AT_ONCE):
        started = {_start_task(node, _now): (node, time.time()) for node in nodes[first : first + AT_ONCE]}
        pending = list(started)
        while pending and time.monotonic() < deadline:
            done, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            after = time.time()
            for task in done:
                node, before = started[task]
                with contextlib.suppress(ray.exceptions.RayError):
                    found[node] = (ray.get(task) - (before + after) / 2, (after - before) / 2)
    return found


def _facts() -> Any:
    return collect.collect_facts()


def _now() -> float:
    return time.time()


def _start_task(node: str, function: Any) -> Any:
    """Start a task on a node that uses none of its resources."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote = ray.remote(num_cpus=0, max_retries=0)(function)
    return remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()


def _wait(tasks: dict[Any, str], deadline: float) -> dict[str, Any]:
    """The results until the deadline, by node; failed tasks are omitted."""
    done, _ = ray.wait(list(tasks), num_returns=len(tasks), timeout=max(0.0, deadline - time.monotonic()))
    found = {}
    for task in done:
        with contextlib.suppress(ray.exceptions.RayError):
            found[tasks[task]] = ray.get(task)
    return found
