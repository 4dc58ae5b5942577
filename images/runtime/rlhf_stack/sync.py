"""The group through which the trainer's rank 0 sends its weights to every engine worker.

Rank 0 is the trainer; the workers of engine i with tensor parallelism T have the ranks i*T+1 ... (i+1)*T.
The group stands beside the default group of each process and never touches it.
"""

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from rlhf_stack import devices, settings

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

BACKENDS = ("nccl", "gloo")


class SyncError(RuntimeError):
    """A weight sync that cannot be done or did not finish in time."""


class WeightGroup(Protocol):
    """What upstream's code calls."""

    def broadcast(self, tensor: "torch.Tensor", src: int, stream: Any) -> None:
        """Fill ``tensor`` on every rank with that of rank ``src``; ``stream`` matters to NCCL only."""


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
    if backend == "nccl" and devices.is_gpu():
        from vllm.distributed import utils

        nccl = NcclGroup if hasattr(utils, "StatelessProcessGroup") else TorchNcclGroup
        return nccl(host, port, rank, world, device)
    if backend == "nccl" and rank == 0:
        logger.warning("weight sync uses gloo: backend nccl needs GPUs and this image has none")
    return GlooGroup(host, port, rank, world)


def wait(references: Sequence[Any], what: str) -> list[Any]:
    """``ray.get`` with the sync deadline; ``what`` is awaited, for the error."""
    return _get(references, settings.sync_timeout(), settings.SYNC_TIMEOUT, what)


def wait_for_engines(engines: Sequence[Any]) -> None:
    """Until every engine actor is up, so that one that died at its start is known before the rendezvous."""
    references = [engine.__ray_ready__.remote() for engine in engines]
    _get(references, settings.engine_timeout(), settings.ENGINE_TIMEOUT, "the engines to start")


def _get(references: Sequence[Any], seconds: float, variable: str, what: str) -> list[Any]:
    import ray

    try:
        results: list[Any] = ray.get(list(references), timeout=seconds)
    except ray.exceptions.GetTimeoutError as error:
        done, _ = ray.wait(list(references), num_returns=len(references), timeout=0)
        late = [index for index, reference in enumerate(references) if reference not in done]
        raise SyncError(
            f"waited {seconds:g} s for {what}; engines {late} of {len(references)} did not answer "
            f"(deadline: {variable})"
        ) from error
    return results


class NcclGroup:
    """Upstream's own: vLLM's PyNcclCommunicator, which here may not be switched off unnoticed."""

    name = "nccl"

    def __init__(self, host: str, port: int, rank: int, world: int, device: Any) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        group = StatelessProcessGroup.create(
            host=host,
            port=port,
            rank=rank,
            world_size=world,
            store_timeout=int(settings.sync_timeout()),
        )
        self._communicator = PyNcclCommunicator(group, device=device)
        if self._communicator.disabled and world > 1:
            raise SyncError(
                f"rank {rank} on {socket.gethostname()}: vLLM could not load NCCL or VLLM_DISABLE_PYNCCL is "
                "set, so engines would load garbage as weights; mend it, or use --vllm.sync_backend gloo"
            )

    def broadcast(self, tensor: "torch.Tensor", src: int, stream: Any) -> None:
        self._communicator.broadcast(tensor, src=src, stream=stream)


class TorchNcclGroup:
    """torch's NCCL group, as upstream makes it where vLLM has no communicator for others (vLLM 0.4).

    A broadcast that is not done within the deadline ends the process: torch's watchdog sees to it.
    """

    name = "nccl"

    def __init__(self, host: str, port: int, rank: int, world: int, device: Any) -> None:  # noqa: ARG002
        from openrlhf.utils.distributed_util import init_process_group

        self._group = init_process_group(
            backend="nccl",
            init_method=f"tcp://{host}:{port}",
            timeout=timedelta(seconds=settings.sync_timeout()),
            world_size=world,
            rank=rank,
            group_name="openrlhf",
        )

    def broadcast(self, tensor: "torch.Tensor", src: int, stream: Any) -> None:  # noqa: ARG002
        import torch.distributed as dist

        dist.broadcast(tensor, src, group=self._group)


class GlooGroup:
    """A gloo group over a store of its own. It sends bytes, so every dtype is exact; GPUs' go by the host."""

    name = "gloo"

    def __init__(self, host: str, port: int, rank: int, world: int) -> None:
        import torch.distributed as dist

        self._rank, self._world = rank, world
        self._seconds = settings.sync_timeout()
        limit = timedelta(seconds=self._seconds)
        end = time.monotonic() + self._seconds
        try:
            store = dist.TCPStore(host, port, None, rank == 0, limit, wait_for_workers=False)
        except dist.DistError as error:
            raise SyncError(
                f"weight sync, rank {rank} of {world} on {socket.gethostname()}: rank 0 (the trainer) is not "
                f"reachable at {host}:{port} within {self._seconds:g} s ({settings.SYNC_TIMEOUT}): {error}"
            ) from error
        self._store = store
        address = host if rank == 0 else _own_address(host, port)
        self._addresses = self._rendezvous(address, end)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = limit
        options._threads = 2
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        if interface:
            options._devices = [dist.ProcessGroupGloo.create_device(interface=interface)]
        else:  # not by host name, which resolves to 127.0.1.1 on a stock Debian
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        prefixed = dist.PrefixStore("gloo", store)
        self._group = self._guard(
            "connecting to the other ranks", lambda: dist.ProcessGroupGloo(prefixed, rank, world, options)
        )

    def broadcast(self, tensor: "torch.Tensor", src: int, stream: Any) -> None:  # noqa: ARG002
        import torch
        from torch.distributed import BroadcastOptions

        if tensor.numel() == 0:
            return
        content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        what = f"broadcast of {content.numel()} bytes from rank {src} ({self._addresses[src]})"
        self._guard(what, lambda: self._group.broadcast([content], options).wait())
        if self._rank != src:
            tensor.copy_(content.view(tensor.dtype).reshape(tensor.shape))

    def _rendezvous(self, address: str, end: float) -> list[str]:
        """The address of each rank, once all have written theirs to the store."""
        keys = [f"rank{rank}" for rank in range(self._world)]
        self._store.set(keys[self._rank], address)
        try:
            self._store.wait(keys, timedelta(seconds=max(0.001, end - time.monotonic())))
        except RuntimeError as error:
            raise SyncError(
                f"weight sync, rank {self._rank} on {address}: {self._absent(keys)} within "
                f"{self._seconds:g} s ({settings.SYNC_TIMEOUT}); rank 0 is the trainer, the others are "
                "engine workers: look for their errors in the log"
            ) from error
        return [self._store.get(key).decode() for key in keys]

    def _absent(self, keys: list[str]) -> str:
        """Who has not joined, as a sentence; the store is rank 0's and ends with it."""
        try:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        except RuntimeError:
            return "not every rank joined, and rank 0 has given up"
        return f"ranks {missing} of {self._world} did not join"

    def _guard(self, what: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except RuntimeError as error:
            raise SyncError(
                f"weight sync, rank {self._rank} on {self._addresses[self._rank]}: {what} failed or took "
                f"more than {self._seconds:g} s ({settings.SYNC_TIMEOUT}): {error}"
            ) from error


def _own_address(host: str, port: int) -> str:
    """The address by which ``host`` knows this machine."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
