"""Checks of the sync backend that a run requests, and creation of its group."""

import logging
import socket
from typing import Any

from rlhf_stack.accelerator import devices
from rlhf_stack.config import env_vars
from rlhf_stack.sync import backend_selection
from rlhf_stack.sync.errors import SyncError
from rlhf_stack.sync.gloo import GlooGroup
from rlhf_stack.sync.group import Watch, WeightGroup, unwatched
from rlhf_stack.sync.membership import Members
from rlhf_stack.sync.nccl import NcclGroup, StreamGroup, TorchNcclGroup

logger = logging.getLogger(__name__)

BACKENDS = env_vars.SYNC_BACKENDS


def requested_backend(arguments: Any) -> str:
    """Return the backend of OpenRLHF's arguments; ``auto`` on shared GPUs is nccl, upstream's CUDA IPC."""
    backend = str(getattr(arguments.vllm, "sync_backend", "nccl"))
    shared = arguments.train.colocate_all and not arguments.train.async_enable
    return "nccl" if backend == "auto" and shared else backend


def check_backend(backend: str, with_ray: bool) -> None:
    """Raise `SyncError` if ``backend`` is unknown or cannot work, before any engine joins.

    ``with_ray`` is upstream's --vllm.sync_with_ray: Ray's own collectives instead of this group.
    """
    if backend not in BACKENDS:
        raise SyncError(f"weight sync backend {backend}: expected one of {', '.join(BACKENDS)}")
    if with_ray and backend != "nccl":
        raise SyncError(
            f"--vllm.sync_with_ray does not work with --vllm.sync_backend {backend}: Ray builds its gloo "
            "group in the default group, which vLLM's workers already own; leave out --vllm.sync_with_ray"
        )
    if backend == "nccl" and devices.is_gpu() and (defect := backend_selection.known_defect()):
        raise SyncError(f"{defect}, or --vllm.sync_backend gloo")


def create_group(
    host: str,
    port: int,
    rank: int,
    world: int,
    device: Any,
    backend: str,
    listener: socket.socket | None = None,
    watch: Watch = unwatched,
) -> WeightGroup:
    """Join the sync group of ``world`` ranks whose rank 0 listens on ``host``:``port``, with ``listener`` if
    it has one already. ``watch``: see `Members`.

    ``device`` holds the weights. NCCL needs a GPU: on a CPU, rank 0 logs a warning and the group uses gloo.
    ``auto`` uses NCCL if it works between all ranks, else gloo.
    """
    check_backend(backend, with_ray=False)
    members = Members(host, port, rank, world, listener, watch)
    if backend == "auto":
        return backend_selection.select_group(members, lambda separate: _nccl(separate, device))
    if backend == "nccl" and devices.is_gpu():
        group = _nccl(members, device)
        group.join()
        return group
    if backend == "nccl" and rank == 0:
        logger.warning("weight sync uses gloo: backend nccl needs GPUs and this image has none")
    return GlooGroup(members)


def _nccl(members: Members, device: Any) -> StreamGroup:
    """Return a group over NCCL that has not joined the other ranks."""
    from vllm.distributed import utils

    return (NcclGroup if hasattr(utils, "StatelessProcessGroup") else TorchNcclGroup)(members, device)
