"""Sync groups over NCCL (RCCL on AMD). No GPU was at hand: these were read and typed, not run."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rlhf_stack.config import env_vars
from rlhf_stack.sync.deadlines import Background
from rlhf_stack.sync.errors import SyncError
from rlhf_stack.sync.group import Buffers
from rlhf_stack.sync.membership import Members

if TYPE_CHECKING:
    import torch

POLL_SECONDS = 0.0005


class NcclTransfer:
    """Broadcasts on a stream of their own; NCCL has no deadline, so this looks until the stream is there."""

    def __init__(
        self, reached: Callable[[], bool], members: Members, failed: Callable[[RuntimeError], SyncError]
    ) -> None:
        self._reached, self._members, self._failed = reached, members, failed
        self._end = time.monotonic() + env_vars.sync_timeout() - env_vars.sync_grace()

    def finish(self) -> None:
        """See `Transfer`."""
        try:
            self._members.watch(self._done)
        except RuntimeError as error:
            raise self._failed(error) from error

    def release(self) -> None:
        """Nothing: each rank has buffers of its own."""

    def _done(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not self._reached():
            if time.monotonic() > self._end:
                raise RuntimeError("the GPU's stream has not come to the end of the broadcast")
            if time.monotonic() > until:
                return False
            time.sleep(POLL_SECONDS)
        return True


class _OnStream:
    """What both groups do: bytes go on a stream beside the current one, which packs and loads."""

    name = "nccl"
    in_place = True

    def __init__(self, members: Members, device: Any) -> None:
        import torch

        self.rank, self.who, self._members = members.rank, members.who, members
        self.answers: list[dict[str, Any]] = []
        self.device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        self.buffers = Buffers(self.device, pinned=False)
        self._stream = torch.cuda.Stream(self.device)

    def start(self, parts: Sequence["torch.Tensor"], what: str) -> NcclTransfer:
        """See `WeightGroup`."""
        import torch

        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for part in parts:
                if part.numel():
                    self.broadcast(part, src=0, stream=self._stream)
            reached = self._stream.record_event()
        return NcclTransfer(reached.query, self._members, lambda error: self._failed(what, error))

    def broadcast(self, tensor: "torch.Tensor", src: int, stream: Any) -> None:
        """See `WeightGroup`."""
        raise NotImplementedError

    def syncing(self) -> AbstractContextManager[None]:
        """See `WeightGroup`."""
        return self._members.syncing()

    def _failed(self, what: str, error: RuntimeError) -> SyncError:
        return self._members.failure(f"nccl, {what}", error)


class NcclGroup(_OnStream):
    """Upstream's own: vLLM's PyNcclCommunicator, which here may not be switched off unnoticed."""

    def __init__(self, members: Members, device: Any) -> None:
        import torch.distributed as dist
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        super().__init__(members, device)
        store = dist.PrefixStore("nccl", members.connection())
        group = StatelessProcessGroup(rank=members.rank, world_size=members.world, store=store)
        joining = Background(lambda: PyNcclCommunicator(group, device=device))
        if not joining.done(env_vars.sync_timeout() - env_vars.sync_grace()):
            raise members.failure("nccl, joining the communicator", TimeoutError("ncclCommInitRank waits"))
        self._communicator = joining.result()
        if self._communicator.disabled and members.world > 1:
            raise SyncError(
                f"{self.who(self.rank)}: vLLM could not load NCCL or VLLM_DISABLE_PYNCCL is set, so engines "
                "would load garbage as weights; mend it, or use --vllm.sync_backend gloo"
            )

    def broadcast(self, tensor: "torch.Tensor", src: int, stream: Any) -> None:
        """See `WeightGroup`."""
        self._communicator.broadcast(tensor, src=src, stream=stream)

    def _failed(self, what: str, error: RuntimeError) -> SyncError:
        """The error; what NCCL still does on this GPU is aborted."""
        failure = super()._failed(what, error)
        self._communicator.destroy()
        return failure


class TorchNcclGroup(_OnStream):
    """torch's NCCL group, as upstream makes it where vLLM has no communicator for others (vLLM 0.4).

    A broadcast that is not done within the deadline ends the process: torch's watchdog sees to it.
    """

    def __init__(self, members: Members, device: Any) -> None:
        import torch.distributed as dist
        from openrlhf.utils.distributed_util import init_process_group

        super().__init__(members, device)
        self._group = init_process_group(
            backend="nccl",
            timeout=timedelta(seconds=env_vars.sync_timeout()),
            store=dist.PrefixStore("nccl", members.connection()),
            world_size=members.world,
            rank=members.rank,
            group_name="openrlhf",
        )

    def broadcast(self, tensor: "torch.Tensor", src: int, stream: Any) -> None:  # noqa: ARG002
        """See `WeightGroup`."""
        import torch.distributed as dist

        dist.broadcast(tensor, src, group=self._group)
