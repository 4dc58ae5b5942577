"""The nodes of the cluster after a fault: which still answer, and what the ended run left on them."""

import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf_stack.accelerator import nvidia
from rlhf_stack.compat.ray_private import node_gpu_entries, was_removed_when_idle
from rlhf_stack.config import env_vars
from rlhf_stack.lazy import ray

REAP = ("rlhf-stack", "reap", "--yes")
REAP_SECONDS = 60.0
ANSWER_SECONDS = 90.0  # Ray notices a node that was cut off after about a minute


@dataclass(frozen=True)
class Nodes:
    """Addresses of live nodes by whether they answer; a node that Ray still lists may have ended.

    ``answering`` has Ray's id of each node, which is another one after it was restarted. ``gone`` has, by id,
    address and reason ("" if Ray gives none) of each node that is dead or does not answer, except those that
    the autoscaler removed because they were idle, whose ids are ``removed``. A node with a GPU that cannot be
    used counts as one that does not answer; ``faults`` has the GPU and the reason by its address.
    """

    answering: Mapping[str, str]
    silent: tuple[str, ...]
    gone: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    faults: Mapping[str, str] = field(default_factory=dict)


def clean_nodes() -> Nodes:
    """Run `rlhf-stack reap --yes` on every node of the connected cluster; return which of them answered.

    Each node then also reports its GPUs that cannot be used, which Ray would go on to assign.
    """
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
    answers = {tasks[task]: _answer(task) for task in done}
    answering = dict(sorted(node for node, fault in answers.items() if fault == ""))
    faults = {node: fault for (_, node), fault in answers.items() if fault}
    silent = {node for address, node in tasks.values() if answering.get(address) != node}
    table = {
        str(entry["NodeID"]): entry  # read again: Ray has found out meanwhile why some are silent
        for entry in ray.nodes()
        if not entry["Alive"] or entry["NodeID"] in silent
    }
    return Nodes(
        answering,
        tuple(sorted({address for address, _ in tasks.values()} - answering.keys())),
        {
            node: (
                str(entry["NodeManagerAddress"]),
                str(entry.get("DeathReasonMessage") or faults.get(node, "")),
            )
            for node, entry in table.items()
            if not was_removed_when_idle(entry)
        },
        tuple(node for node, entry in table.items() if was_removed_when_idle(entry)),
        {address: faults[node] for address, node in tasks.values() if node in faults},
    )


def lost_nodes(before: Mapping[str, str], gone: Collection[str], now: Nodes) -> dict[str, str]:
    """Return the reason ("" if Ray gives none) by the address of each node that was lost.

    ``before`` are the nodes that answered and ``gone`` the ids of those that were gone when the job was
    placed. A node that is gone ``now`` is lost, also if it joined since, and so is one of ``before`` whose
    address does not answer or is that of another Ray node; not one that was removed because it was idle.
    """
    found = {
        address: ""
        for address, node in before.items()
        if now.answering.get(address) != node and node not in now.removed
    }
    found |= {address: reason for node, (address, reason) in now.gone.items() if node not in gone}
    return dict(sorted(found.items()))


def _answer(task: Any) -> str | None:
    """The result of `_reap` on a node, None if it has none."""
    try:
        return str(ray.get(task))
    except ray.exceptions.RayError:  # the node ended meanwhile
        return None


def _reap() -> str:
    """Remove what the run left on this node; return which of its GPUs cannot be used, and why."""
    subprocess.run(REAP, capture_output=True, timeout=REAP_SECONDS, check=False)
    return ", ".join(f"GPU {number}: {fault}" for number, fault in _gpu_faults().items())


def _gpu_faults() -> dict[int, str]:
    """The faults of the GPUs that this node offers, by number; none where it lists them by UUID."""
    if env_vars.accelerator() == "cpu" or not (found := nvidia.faults()):
        return {}
    offered = node_gpu_entries()
    return {number: fault for number, fault in found.items() if offered is None or str(number) in offered}
