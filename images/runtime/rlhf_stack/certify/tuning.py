"""What `rlhf-stack tune` chooses for the run of a training rung on the GPUs that were found."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_stack.accelerator import devices
from rlhf_stack.certify.on_cluster import on_every_node
from rlhf_stack.errors import UserError
from rlhf_stack.lazy import torch
from rlhf_stack.memory import read_shape
from rlhf_stack.openrlhf import command_line, run_spec
from rlhf_stack.placement import FreeNode
from rlhf_stack.planning import cluster_spec, tuning
from rlhf_stack.planning.cluster_spec import Machine

GIB = 1 << 30
SECONDS = 300.0  # OpenRLHF's parser imports vLLM and DeepSpeed, which takes 20 s on a quiet machine
ASSUMED = 80 * GIB  # the memory of a fake GPU


def choose(nodes: Sequence[FreeNode], arguments: Sequence[str]) -> dict[str, Any]:
    """Tune the run with these ``arguments`` for the connected cluster, on a node that has its model.

    ``problems`` are the reasons why it does not fit, or why it could not be planned.
    """
    try:
        return _chosen(nodes, arguments)
    except RuntimeError as error:  # a node that does not answer in time: the rung itself trains first
        return {"settings": {}, "problems": [str(error)]}


def _chosen(nodes: Sequence[FreeNode], arguments: Sequence[str]) -> dict[str, Any]:
    sizes = dict(zip((node.address for node in nodes), on_every_node(nodes, gpu_memory), strict=True))
    machines = [
        replace(
            machine,
            gpu_memory=sizes.get(machine.address, 0),
            # Nodes with fake GPUs may share a host of a few GiB, which is no machine to plan a run for.
            memory=machine.memory if devices.is_gpu() else 0,
        )
        for machine in cluster_spec.ray_machines(0)
    ]
    (found,) = on_every_node(nodes[:1], tuned, machines, list(arguments), seconds=SECONDS)
    return {"gpu_memory": sizes, **found}


def gpu_memory() -> int:
    """The bytes of the smallest GPU of this node, also in a process of Ray that has none of them."""
    if not devices.is_gpu():
        return ASSUMED
    for variable in devices.VISIBLE_VARIABLES:
        os.environ.pop(variable, None)
    count = torch.cuda.device_count()
    return min((torch.cuda.get_device_properties(index).total_memory for index in range(count)), default=0)


def tuned(machines: Sequence[Machine], arguments: Sequence[str]) -> dict[str, Any]:
    """The settings with their reasons, and problems, as JSON values."""
    try:
        parsed = command_line.parse(arguments)
        run = run_spec.run_of(parsed.release, parsed.values)
        names = dict.fromkeys([run.engine_model, *(role.model for role in run.roles)])
        found = tuning.tune(run, machines, {name: read_shape(Path(name)) for name in names})
    except UserError as error:
        return {"settings": {}, "problems": [str(error)]}
    settings = {(f"no {one.text}" if one.dropped else one.text): one.reason for one in found.settings}
    return {"settings": settings, "problems": list(found.problems)}
