"""The Ray cluster on which the ladder is climbed, running or started here, and actors on its GPUs."""

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf_stack.accelerator import devices
from rlhf_stack.certify.ladder import NotClimbedError, Place
from rlhf_stack.cleanup import process_table
from rlhf_stack.cluster import assigned_gpu
from rlhf_stack.cluster.connect import connect, connected
from rlhf_stack.cluster.host import endpoint, free_port
from rlhf_stack.errors import UserError
from rlhf_stack.lazy import ray, torch
from rlhf_stack.placement import FreeNode
from rlhf_stack.placement.reservation import PIN, SLIVER, free_nodes

START_SECONDS = 120.0
RELEASE_SECONDS = 30.0  # Ray reports GPUs of processes that have ended as free after a moment
POLL_SECONDS = 0.5
OBJECT_STORE = 200 << 20  # bytes of shared memory on each node of our own cluster
LATE = "no answer within"
LOOPBACK = "127.0.1.{}"


@contextmanager
def cluster(address: str, fake_gpus: Sequence[int], default: Sequence[int]) -> Iterator[str]:
    """Yield the address of the cluster at ``address``; "auto": that of this machine, or a new one.

    A new one has this machine as its node, in an image for CPUs nodes with ``fake_gpus`` or the ``default``.
    `UserError` if fake GPUs are requested and a cluster is running.
    """
    try:
        with connected(address):
            found = str(ray.get_runtime_context().gcs_address)
    except UserError:
        if address != "auto" or process_table.gcs_address(process_table.snapshot()):
            raise  # a cluster that refuses us, or does not answer, has the GPUs
        found = ""
    if found and fake_gpus:
        raise UserError(f"--fake-gpus: a cluster is running at {found}; its GPUs are those of its nodes")
    if found:
        yield found
        return
    with _own(fake_gpus or default) as own:
        yield own


@contextmanager
def _own(fake_gpus: Sequence[int]) -> Iterator[str]:
    from ray.cluster_utils import Cluster

    gpus = [torch.cuda.device_count()] if devices.is_gpu() else fake_gpus
    running = Cluster()
    try:
        for index, count in enumerate(gpus):
            place = {"node_ip_address": LOOPBACK.format(index + 1)} if index else {}
            running.add_node(
                num_cpus=max(4, os.cpu_count() or 1, 2 * count),
                num_gpus=count,
                object_store_memory=OBJECT_STORE,
                include_dashboard=False,
                **place,
            )
        yield str(running.address)
    finally:
        running.shutdown()


def join_group(where: tuple[str, int], rank: int, world: int, **options: Any) -> None:
    """Join torch's default group, whose rank 0 listens ``where`` (`free_endpoint`)."""
    import torch.distributed as dist

    dist.init_process_group(
        devices.collective_backend(),
        init_method=f"tcp://{endpoint(*where)}",
        rank=rank,
        world_size=world,
        **options,
    )


def free_endpoint(_: object) -> tuple[str, int]:
    """The address of this actor's node, and a free port of it."""
    address = str(ray.util.get_node_ip_address())
    return address, free_port(address)


@contextmanager
def nodes_with_gpus(place: Place) -> Iterator[list[FreeNode]]:
    """Connect to the cluster for the duration of the context, and yield its nodes that have GPUs, all free.

    GPUs in use, such as those of processes that this rung has just ended, are awaited for `RELEASE_SECONDS`.
    """
    with connected(place.address, show_workers=True):  # for the record of the rung
        end = time.monotonic() + RELEASE_SECONDS
        while True:
            found = [node for node in free_nodes() if node.total_gpus >= 1]
            if not found:
                raise NotClimbedError("no node of the cluster has a GPU")
            busy = [node.address for node in found if node.gpus < node.total_gpus]
            if not busy:
                break
            if time.monotonic() > end:
                raise NotClimbedError(f"GPUs are in use on {', '.join(busy)}: stop what runs there")
            time.sleep(POLL_SECONDS)
        yield found


def gpus_of(nodes: Sequence[FreeNode]) -> list[str]:
    """The address of the node of each GPU, node by node."""
    return [node.address for node in nodes for _ in range(int(node.total_gpus))]


@contextmanager
def actors(kind: Any, addresses: Sequence[str], gpus: float = 1.0) -> Iterator[list[Any]]:
    """Yield an actor of class ``kind`` for each address, with ``gpus``; all are killed afterwards."""
    options = {"num_cpus": 0, "num_gpus": gpus, "max_restarts": 0}
    started = [
        ray.remote(kind).options(**options, resources={PIN + address: SLIVER}).remote()
        for address in addresses
    ]
    try:
        yield started
    finally:
        for actor in started:
            ray.kill(actor)


def answers(calls: Sequence[Any], who: Sequence[str], seconds: float) -> list[Any]:
    """The results of calls of actors; RuntimeError names the ones in ``who`` that fail or are late."""
    end = time.monotonic() + seconds
    ray.wait(list(calls), num_returns=len(calls), timeout=seconds)
    found, errors = [], []
    for call, name in zip(calls, who, strict=True):
        try:
            found.append(ray.get(call, timeout=max(0.0, end - time.monotonic())))
        except ray.exceptions.GetTimeoutError:
            errors.append(f"{name}: {LATE} {seconds:.0f} s")
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            first = (str(cause).strip().splitlines() or ["no message"])[0]
            errors.append(f"{name}: {type(cause).__name__}: {first}")
    if errors:
        raise RuntimeError("; ".join(errors))
    return found


class Hand:
    """An actor that calls a function on its node."""

    def run(self, function: Any, *arguments: Any) -> Any:
        """Return what ``function`` returns, which runs on the GPU of this actor, if it has one."""
        assigned_gpu.select()
        return function(*arguments)


def remove(place: Place) -> None:
    """Remove the folder of this run on every node that answers."""
    with connected(place.address), suppress(RuntimeError):
        on_every_node(free_nodes(), shutil.rmtree, place.folder, True)


def on_every_node(
    nodes: Sequence[FreeNode], function: Any, *arguments: Any, seconds: float = START_SECONDS
) -> list[Any]:
    """What ``function`` returns on each node within ``seconds``."""
    addresses = [node.address for node in nodes]
    with actors(Hand, addresses, gpus=0) as hands:
        return answers([hand.run.remote(function, *arguments) for hand in hands], addresses, seconds)


def make_files(place: Place, nodes: Sequence[FreeNode], steps: int, layers: int = 2) -> Path:
    """Write the demo's model and prompts to a folder with the same path on every node; return the folder."""
    folder = Path(place.folder, f"tiny-{steps}-{layers}")
    on_every_node(nodes, write_files, str(folder), steps, layers)
    return folder


def write_files(folder: str, steps: int, layers: int) -> None:
    """Write the demo's files on this node; nodes that share the folder write the same content."""
    from rlhf_stack.demo import tiny_model

    done = Path(folder, "done")
    if not done.exists():
        Path(folder).mkdir(parents=True, exist_ok=True)
        tiny_model.make(Path(folder), seed=0, steps=steps, layers=layers)
        done.touch()


def node_report(place: Place, seconds: float) -> list[dict[str, Any]]:
    """Facts, address and Ray's GPUs of each node as JSON values; RuntimeError names silent nodes."""
    from rlhf_stack.diagnostics.doctor.cluster import collect_from_nodes

    found, _ = collect_from_nodes(place.address, seconds)
    if silent := [each.address for each in found if each.node is None]:
        raise RuntimeError(f"no facts of {', '.join(silent)} within {seconds:.0f} s")
    connect(place.address)
    gpus = {node.address: node.total_gpus for node in free_nodes()}
    return [
        {"address": each.address, "ray_gpus": gpus.get(each.address, 0.0)} | asdict(each.node)
        for each in found
        if each.node is not None
    ]
