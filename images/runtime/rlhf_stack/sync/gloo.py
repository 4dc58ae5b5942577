"""A sync group over gloo: bytes from host to host, for every dtype and every accelerator."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rlhf_stack import devices, settings
from rlhf_stack.sync.buckets import chain
from rlhf_stack.sync.errors import SyncError
from rlhf_stack.sync.group import Buffers
from rlhf_stack.sync.members import Members, gloo_device
from rlhf_stack.sync.waiting import Background

if TYPE_CHECKING:
    import torch

SEGMENT = 4 << 20  # bytes that a rank takes before it hands them on
THREADS = 2


class GlooTransfer:
    """Bytes that gloo's own thread sends or receives, or that one of ours hands on."""

    def __init__(
        self, moving: Background[None], members: Members, failed: Callable[[RuntimeError], SyncError]
    ) -> None:
        self._moving, self._members, self._failed = moving, members, failed

    def finish(self) -> None:
        """See `Transfer`."""
        try:
            self._members.watch(self._moving.done)
            self._moving.result()
        except RuntimeError as error:
            raise self._failed(error) from error


class GlooGroup:
    """A gloo group over a store of its own. Ranks hand the bytes on in a chain; GPUs' go by the host.

    gloo's broadcast is a tree: the trainer's link would carry the weights once for each of its branches.
    """

    name = "gloo"

    def __init__(self, members: Members) -> None:
        import torch
        import torch.distributed as dist

        self.rank, self.who, self._members = members.rank, members.who, members
        self.answers: list[dict[str, Any]] = []
        self.device = torch.device("cpu")
        self.buffers = Buffers(self.device, pinned=devices.is_gpu())
        order = chain(members.addresses)
        position = order.index(self.rank)
        self._before = order[position - 1] if position else None
        self._after = order[position + 1] if position + 1 < len(order) else None
        self._started = 0
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=settings.sync_timeout() - settings.sync_grace())
        options._threads = THREADS
        options._devices = [gloo_device(members.address)]
        store = dist.PrefixStore("gloo", members.connection())
        try:
            self._group: Any = dist.ProcessGroupGloo(store, self.rank, members.world, options)
        except RuntimeError as error:
            raise members.failure("connecting to the other ranks by gloo", error) from error

    def broadcast(self, tensor: "torch.Tensor", src: int, stream: Any) -> None:  # noqa: ARG002
        """See `WeightGroup`."""
        import torch
        from torch.distributed import BroadcastOptions

        if tensor.numel() == 0:
            return
        content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        what = f"broadcast of {content.numel()} bytes from {self.who(src)}"
        try:
            self._group.broadcast([content], options).wait()
        except RuntimeError as error:
            raise self._failed(what, error) from error
        if self.rank != src:
            tensor.copy_(content.view(tensor.dtype).reshape(tensor.shape))

    def start(self, parts: Sequence["torch.Tensor"], what: str) -> GlooTransfer:
        """See `WeightGroup`."""
        segments = [segment for part in parts for segment in part.split(SEGMENT) if segment.numel()]
        self._started += 1
        tag = self._started % 2  # two transfers are on their way at a time
        group, before, after = self._group, self._before, self._after
        arriving, leaving = [], []
        try:
            if before is not None:
                arriving = [group.recv([segment], before, tag) for segment in segments]
            else:
                leaving = [group.send([segment], after, tag) for segment in segments]
        except RuntimeError as error:
            raise self._failed(what, error) from error

        def move() -> None:
            for segment, work in zip(segments, arriving, strict=False):
                work.wait()
                if after is not None:
                    leaving.append(group.send([segment], after, tag))
            for work in leaving:
                work.wait()

        return GlooTransfer(Background(move), self._members, lambda error: self._failed(what, error))

    def syncing(self) -> AbstractContextManager[None]:
        """See `WeightGroup`."""
        return self._members.syncing()

    def _failed(self, what: str, error: RuntimeError) -> SyncError:
        return self._members.failure(f"gloo, {what}", error)
