"""The nodes of the cluster after a fault: which still answer, and what the ended run left on them."""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_stack.lazy import ray

REAP = ("rlhf-stack", "reap", "--yes")
REAP_SECONDS = 60.0
ANSWER_SECONDS = 90.0  # Ray notices a node that was cut off after about a minute


@dataclass(frozen=True)
class Nodes:
    """Addresses of live nodes by whether they answer; a node that Ray still lists may have ended.

    ``answering`` has Ray's id of each node, which is another one after it was restarted.
    """

    answering: Mapping[str, str]
    silent: tuple[str, ...]


def clean_nodes() -> Nodes:
    """Run `rlhf-stack reap --yes` on every node of the connected cluster; return which of them answered."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    reap = ray.remote(num_cpus=0, max_retries=0)(_reap)
    tasks = {
        reap.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(entry["NodeID"], soft=False)
        ).remote(): (str(entry["NodeManagerAddress"]), str(entry["NodeID"]))
        for entry in ray.nodes()
        if entry["Alive"]
    }
    done, pending = ray.wait(list(tasks), num_returns=len(tasks), timeout=ANSWER_SECONDS)
    for task in pending:
        ray.cancel(task, force=True)
    answering = dict(sorted(tasks[task] for task in done if _succeeded(task)))
    return Nodes(answering, tuple(sorted({address for address, _ in tasks.values()} - answering.keys())))


def lost_nodes(before: Mapping[str, str], now: Nodes) -> tuple[str, ...]:
    """Return the addresses of ``before`` that do not answer ``now``, or where another Ray node does."""
    return tuple(sorted(address for address, node in before.items() if now.answering.get(address) != node))


def _succeeded(task: Any) -> bool:
    try:
        ray.get(task)
    except ray.exceptions.RayError:  # the node ended meanwhile
        return False
    return True


def _reap() -> None:
    subprocess.run(REAP, capture_output=True, timeout=REAP_SECONDS, check=False)
