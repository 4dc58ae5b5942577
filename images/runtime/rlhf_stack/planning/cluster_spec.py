"""The machines to plan on: from options, from a YAML file, or from a running Ray cluster."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_stack.errors import UserError
from rlhf_stack.placement.model import FreeNode

GIB = 1 << 30
SIZES = {"count": 1.0, "gpus": 8.0, "gpu_memory": 0.0, "cpus": 0.0, "memory": 0.0}
EXAMPLE = "nodes: [{count: 2, gpus: 8, gpu_memory: 80, cpus: 96, memory: 1000}]"


@dataclass(frozen=True)
class Machine:
    """A node. ``gpu_memory`` is in bytes per GPU, ``memory`` in bytes of the host; 0: unknown."""

    address: str
    gpus: int
    cpus: float
    gpu_memory: int = 0
    memory: int = 0
    free_gpus: float | None = None
    free_cpus: float | None = None

    @property
    def free(self) -> FreeNode:
        """The free resources of the machine."""
        gpus = self.gpus if self.free_gpus is None else self.free_gpus
        return FreeNode(
            self.address, gpus, self.cpus if self.free_cpus is None else self.free_cpus, self.gpus
        )


def uniform_machines(count: int, gpus: int, gpu_memory: float, cpus: float, memory: float) -> list[Machine]:
    """``count`` equal machines; memory in GiB; ``cpus`` 0: enough CPUs for the GPUs."""
    sizes = {"count": count, "gpus": gpus, "gpu_memory": gpu_memory, "cpus": cpus, "memory": memory}
    return _machines([sizes], "the command line")


def read_machines(path: Path) -> list[Machine]:
    """Read machines from a YAML file such as `EXAMPLE`, memory in GiB; `UserError` if it is invalid."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not YAML ({' '.join(str(error).split())})") from None
    entries = content.get("nodes") if isinstance(content, Mapping) else None
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise UserError(f"{path}: expected a list of nodes, such as {EXAMPLE}")
    return _machines(entries, str(path))


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
                )
            )
    order = {node.address: index for index, node in enumerate(free)}
    return sorted(found, key=lambda machine: order[machine.address])


def ray_machines(gpu_memory: float) -> list[Machine]:
    """The machines of the connected Ray cluster; ``gpu_memory`` in GiB per GPU."""
    import ray

    from rlhf_stack.placement import reservation

    return machines_of_nodes(ray.nodes(), reservation.free_nodes(), gpu_memory)


def _machines(entries: Sequence[Mapping[str, Any]], where: str) -> list[Machine]:
    found: list[Machine] = []
    for entry in entries:
        if unknown := entry.keys() - SIZES.keys() - {"address"}:
            raise UserError(
                f"{where}: unknown {', '.join(unknown)}; a node has {', '.join(SIZES)} and address"
            )
        sizes = {}
        for name, default in SIZES.items():
            value = entry.get(name, default)
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                raise UserError(f"{where}: {name} is {value!r}, expected a number of at least 0")
            sizes[name] = float(value)
        count, gpus = int(sizes["count"]), int(sizes["gpus"])
        for _ in range(count):
            address = entry.get("address") if count == 1 else None
            found.append(
                Machine(
                    address=str(address or f"node-{len(found) + 1}"),
                    gpus=gpus,
                    cpus=sizes["cpus"] or 2.0 * gpus + 8,
                    gpu_memory=int(sizes["gpu_memory"] * GIB),
                    memory=int(sizes["memory"] * GIB),
                )
            )
    if not found:
        raise UserError(f"{where}: no nodes")
    return found
