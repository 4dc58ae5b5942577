"""The machines to plan on: from options, from a YAML file, or from a running Ray cluster."""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_stack.errors import UserError
from rlhf_stack.inputs import numbers
from rlhf_stack.inputs.files import NumberText, read_yaml
from rlhf_stack.inputs.text import one_line, shortened
from rlhf_stack.lazy import ray
from rlhf_stack.placement.model import FreeNode

GIB = numbers.GIB
RAY_TYPE = "accelerator_type:"
TEXTS = ("address", "gpu_type")
SIZES: dict[str, float] = {"count": 1, "gpus": 8, "gpu_memory": 0, "cpus": 0, "memory": 0}
MEMORY = {"gpu_memory": numbers.GPU_MEMORY, "memory": numbers.HOST_MEMORY}
NAME = re.compile(r"[A-Za-z0-9_.:-]{1,253}")
EXAMPLE = "nodes: [{count: 2, gpus: 8, gpu_memory: 80, cpus: 96, memory: 1000}]"


@dataclass(frozen=True)
class Machine:
    """A node. ``gpu_memory`` is in bytes per GPU, ``memory`` in bytes of the host; 0: unknown.

    ``gpu_type`` is the name of its GPUs, such as H100, "" if unknown.
    """

    address: str
    gpus: int
    cpus: float
    gpu_memory: int = 0
    memory: int = 0
    free_gpus: float | None = None
    free_cpus: float | None = None
    gpu_type: str = ""

    @property
    def free(self) -> FreeNode:
        """The free resources of the machine."""
        gpus = self.gpus if self.free_gpus is None else self.free_gpus
        return FreeNode(
            self.address, gpus, self.cpus if self.free_cpus is None else self.free_cpus, self.gpus
        )


def uniform_machines(count: int, gpus: int, gpu_memory: float, cpus: float, memory: float) -> list[Machine]:
    """``count`` equal machines; memory in GiB, 0: unknown; ``cpus`` 0: enough CPUs for the GPUs."""
    known = {"gpu_memory": gpu_memory, "cpus": cpus, "memory": memory}
    sizes = {"count": count, "gpus": gpus} | {name: size for name, size in known.items() if size}
    return _machines([sizes], "the command line")


def read_machines(path: Path) -> list[Machine]:
    """Read machines from a YAML file such as `EXAMPLE`, memory in GiB; `UserError` if it is invalid."""
    content = read_yaml(path)
    entries = content.get("nodes") if isinstance(content, Mapping) else None
    name = shortened(str(path))
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise UserError(f"{name}: expected a list of nodes, such as {EXAMPLE}")
    if unknown := [repr(key) for key in content if key != "nodes"]:
        raise UserError(
            f"{name}: unknown {one_line(', '.join(unknown))}; expected only nodes, such as {EXAMPLE}"
        )
    return _machines(entries, name)


def machines_of_nodes(
    table: Sequence[Mapping[str, Any]], free: Sequence[FreeNode], gpu_memory: float
) -> list[Machine]:
    """The live nodes of ``table``, the result of ``ray.nodes()``, with the ``free`` resources of each.

    Ray does not report the memory of GPUs, so ``gpu_memory`` gives it in GiB. As memory of a host Ray reports
    what was free at its start.
    """
    free_nodes = {node.address: node for node in free}
    found = []
    for entry in table:
        node = free_nodes.get(entry["NodeManagerAddress"])
        if entry["Alive"] and node is not None:
            resources = entry["Resources"]
            found.append(
                Machine(
                    address=node.address,
                    gpus=int(resources.get("GPU", 0)),
                    cpus=resources.get("CPU", 0.0),
                    gpu_memory=int(gpu_memory * GIB),
                    memory=int(resources.get("memory", 0) + resources.get("object_store_memory", 0)),
                    free_gpus=node.gpus,
                    free_cpus=node.cpus,
                    gpu_type=_gpu_type(resources),
                )
            )
    order = {node.address: index for index, node in enumerate(free)}
    return sorted(found, key=lambda machine: order[machine.address])


def _gpu_type(resources: Mapping[str, Any]) -> str:
    """The type of GPU that Ray found on a node, which it declares as a resource."""
    found = (name.removeprefix(RAY_TYPE) for name in sorted(resources) if name.startswith(RAY_TYPE))
    return next(found, "")


def ray_machines(gpu_memory: float, variables: Mapping[str, str] = os.environ) -> list[Machine]:
    """The machines of the connected Ray cluster that ``variables``, those of the run, do not exclude.

    ``gpu_memory`` in GiB per GPU.
    """
    from rlhf_stack.placement import reservation

    return machines_of_nodes(ray.nodes(), reservation.free_nodes(variables), gpu_memory)


def _machines(entries: Sequence[Mapping[str, Any]], where: str) -> list[Machine]:
    found: list[Machine] = []
    for entry in entries:
        if unknown := [str(key) for key in entry if key not in SIZES and key not in TEXTS]:
            raise UserError(
                f"{where}: unknown {', '.join(unknown)}; a node has {', '.join([*SIZES, *TEXTS])}"
            )
        sizes = SIZES | {name: _size(value, name, where) for name, value in entry.items() if name in SIZES}
        count, gpus = int(sizes["count"]), int(sizes["gpus"])
        if "address" in entry and count != 1:
            raise UserError(
                f"{where}: address {entry['address']!r} is that of one node, and count is {count}"
            )
        if len(found) + count > numbers.NODES or sum(one.gpus for one in found) + count * gpus > numbers.GPUS:
            raise UserError(
                f"{where}: more than {numbers.NODES:,} nodes or {numbers.GPUS:,} GPUs, which is the limit"
            )
        machine = Machine(
            address="",
            gpus=gpus,
            cpus=sizes["cpus"] or 2.0 * gpus + 8,
            gpu_memory=int(sizes["gpu_memory"]),
            memory=int(sizes["memory"]),
            gpu_type=_name(entry.get("gpu_type"), "gpu_type", "the name of a GPU", where),
        )
        address = _name(entry.get("address"), "address", "a host name or an IP address", where)
        found += [
            replace(machine, address=address or f"node-{len(found) + number}")
            for number in range(1, count + 1)
        ]
    if not found:
        raise UserError(f"{where}: no nodes")
    addresses = Counter(machine.address for machine in found)
    if twice := [address for address, times in addresses.items() if times > 1]:
        raise UserError(f"{where}: address {twice[0]!r} appears twice")
    return found


def _size(value: object, name: str, where: str) -> float:
    """The value of a key of a node; memory in bytes. `UserError` names the key."""
    text = (
        str(value)
        if isinstance(value, int | float | str) and not isinstance(value, bool)
        else repr(value)[:60]
    )
    try:
        if limits := MEMORY.get(name):
            return float(numbers.size(text, GIB, *limits))
        if name == "cpus":
            return numbers.decimal(text, 0, numbers.CPUS_PER_NODE)
        most = numbers.NODES if name == "count" else numbers.GPUS_PER_NODE
        return float(numbers.whole(text, 1 if name == "count" else 0, most))
    except UserError as error:
        raise UserError(f"{where}: {name} is {error}") from None


def _name(value: object, key: str, expected: str, where: str) -> str:
    """The text of a key of a node; "" if it has none."""
    if value is None:
        return ""
    if not isinstance(value, str) or isinstance(value, NumberText) or not NAME.fullmatch(value):
        raise UserError(f"{where}: {key} is {repr(value)[:60]}, expected {expected}")
    return value
