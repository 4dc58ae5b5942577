"""Collects the facts of every node of this machine's Ray cluster by one task per node, with a deadline."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_stack.cluster.connect import connected
from rlhf_stack.compat import ray_private
from rlhf_stack.diagnostics.doctor import collect
from rlhf_stack.diagnostics.doctor.facts import LostNode, NodeAnswer
from rlhf_stack.lazy import ray

CLOCKS = 0.25  # of the time, kept for the clocks of the nodes that responded
AT_ONCE = 32  # more tasks at once would measure their own queue
END_SECONDS = 5.0  # for the times at which nodes ended, which Ray's head has at hand


def collect_from_nodes(address: str, timeout: float) -> tuple[list[NodeAnswer], list[LostNode]]:
    """Collect the facts of each live node in ``timeout`` seconds, and find the lost nodes.

    An unresponsive node has ``node`` None. `UserError` if the cluster at ``address`` does not respond.
    """
    deadline = time.monotonic() + timeout
    with connected(address):
        table = ray.nodes()
        nodes = {entry["NodeID"]: entry["NodeManagerAddress"] for entry in table if entry["Alive"]}
        facts = _wait({_start_task(node, _facts): node for node in nodes}, deadline - CLOCKS * timeout)
        offsets = _clock_offsets(list(facts), deadline)
        ended = _end_times(address) if len(nodes) < len(table) else {}
    answers = [
        NodeAnswer(address, facts.get(node), *offsets.get(node, (0.0, 0.0)))
        for node, address in nodes.items()
    ]
    return answers, find_lost(table, ended)


def find_lost(table: Sequence[Mapping[str, Any]], ended: Mapping[str, float]) -> list[LostNode]:
    """The dead nodes of ``table``, the result of ``ray.nodes()``, whose address no live node has.

    Each address once, the newest first by ``ended``, seconds since 1970 by node id, which may lack nodes. A
    node that the autoscaler removed because it was idle is not lost. Before Ray 2.55 no node has a reason.
    """
    live = {entry["NodeManagerAddress"] for entry in table if entry["Alive"]}
    dead = (entry for entry in table if entry["NodeManagerAddress"] not in live)
    newest: dict[str, Mapping[str, Any]] = {}
    for entry in sorted(dead, key=lambda one: (-ended.get(one["NodeID"], 0.0), one["NodeManagerAddress"])):
        newest.setdefault(entry["NodeManagerAddress"], entry)
    return [
        LostNode(address, entry.get("DeathReasonMessage", ""), ended.get(entry["NodeID"]))
        for address, entry in newest.items()
        if not ray_private.was_removed_when_idle(entry)
    ]


def _end_times(address: str) -> dict[str, float]:
    with contextlib.suppress(ray.exceptions.RayError):
        return ray_private.node_end_times(address, END_SECONDS)
    return {}


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
