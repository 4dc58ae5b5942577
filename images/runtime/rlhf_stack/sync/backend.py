"""Which group carries the weights."""

import logging
from typing import Any

from rlhf_stack import devices
from rlhf_stack.sync.errors import SyncError
from rlhf_stack.sync.gloo import GlooGroup
from rlhf_stack.sync.group import WeightGroup
from rlhf_stack.sync.members import Members
from rlhf_stack.sync.nccl import NcclGroup, TorchNcclGroup

logger = logging.getLogger(__name__)

BACKENDS = ("nccl", "gloo")


def check_backend(backend: str, with_ray: bool) -> None:
    """Refuse what cannot be honoured, before any engine is asked to join.

    ``with_ray`` is upstream's --vllm.sync_with_ray: Ray's own collectives instead of this group.
    """
    if backend not in BACKENDS:
        raise SyncError(f"weight sync backend {backend}: expected one of {', '.join(BACKENDS)}")
    if with_ray and backend == "gloo":
        raise SyncError(
            "--vllm.sync_with_ray does not work with --vllm.sync_backend gloo: Ray builds its gloo group in "
            "the default group, which vLLM's workers already own; leave out --vllm.sync_with_ray"
        )


def create_group(host: str, port: int, rank: int, world: int, device: Any, backend: str) -> WeightGroup:
    """Join the group of ``world`` ranks whose rank 0 listens on ``host``:``port``.

    ``device`` is where the weights are. NCCL needs a GPU, so a CPU takes gloo and says so.
    """
    check_backend(backend, with_ray=False)
    members = Members(host, port, rank, world)
    if backend == "nccl" and devices.is_gpu():
        from vllm.distributed import utils

        nccl = NcclGroup if hasattr(utils, "StatelessProcessGroup") else TorchNcclGroup
        return nccl(members, device)
    if backend == "nccl" and rank == 0:
        logger.warning("weight sync uses gloo: backend nccl needs GPUs and this image has none")
    return GlooGroup(members)
