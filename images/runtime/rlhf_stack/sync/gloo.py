"""A sync group over gloo: bytes from host to host, for every dtype and every accelerator."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rlhf_stack.accelerator import devices
from rlhf_stack.config import env_vars
from rlhf_stack.sync.buckets import chain
from rlhf_stack.sync.deadlines import Background
from rlhf_stack.sync.errors import SyncError
from rlhf_stack.sync.group import SLOTS, Buffers
from rlhf_stack.sync.membership import Members, gloo_device
from rlhf_stack.sync.node_shared_memory import meet

if TYPE_CHECKING:
    import torch

SEGMENT = 4 << 20  # bytes that a rank takes before it hands them on
THREADS = 2
BYTES, HERE, READ = 0, SLOTS, 2 * SLOTS  # tags, the first of each kind


class GlooTransfer:
    """Bytes that gloo's own threads send or receive, that a rank hands on, or that are shared."""

    def __init__(
        self,
        moving: Callable[[], None],
        releasing: Callable[[], None],
        members: Members,
        failed: Callable[[RuntimeError], SyncError],
    ) -> None:
        self._moving, self._releasing = Background(moving), releasing
        self._members, self._failed = members, failed

    def finish(self) -> None:
        """See `Transfer`."""
        self._await(self._moving)

    def release(self) -> None:
        """See `Transfer`."""
        self._await(Background(self._releasing))

    def _await(self, step: Background[None]) -> None:
        try:
            self._members.watch(step.done)
            step.result()
        except RuntimeError as error:
            raise self._failed(error) from error


class GlooGroup:
    """A gloo group over a store of its own. GPUs' bytes go by the host.

    From node to node ranks hand the bytes on in a chain: gloo's broadcast is a tree, in which the trainer's
    link would carry the weights once for each of its branches. On a node one rank, its head, has them in
    memory that the others, its guests, read.
    """

    name = "gloo"

    def __init__(self, members: Members) -> None:
        import torch
        import torch.distributed as dist

        self.rank, self.who, self._members = members.rank, members.who, members
        self.answers: list[dict[str, Any]] = []
        self.device = torch.device("cpu")
        heads, shared = meet(members)
        self.in_place = shared is None
        self.buffers = shared or Buffers(self.device, pinned=devices.is_gpu())
        self._head = heads[self.rank]
        self._guests = [rank for rank, head in enumerate(heads) if head == self.rank != rank]
        order = [rank for rank in chain(members.addresses) if heads[rank] == rank]
        position = order.index(self._head)
        self._before = order[position - 1] if position else None
        self._after = order[position + 1] if position + 1 < len(order) else None
        self._started = 0
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=env_vars.sync_timeout() - env_vars.sync_grace())
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
        self._started += 1
        slot = self._started % SLOTS
        try:
            steps = self._lead(parts, slot) if self._head == self.rank else self._follow(slot)
        except RuntimeError as error:
            raise self._failed(what, error) from error
        return GlooTransfer(*steps, self._members, lambda error: self._failed(what, error))

    def syncing(self) -> AbstractContextManager[None]:
        """See `WeightGroup`."""
        return self._members.syncing()

    def _lead(
        self, parts: Sequence["torch.Tensor"], slot: int
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """The steps of a head: take the bytes, hand them on, tell the guests; wait until they have read."""
        segments = [segment for part in parts for segment in part.split(SEGMENT) if segment.numel()]
        arriving = self._receive(segments, self._before, BYTES + slot)
        leaving = [] if arriving else self._send(segments, self._after, BYTES + slot)
        read = [work for guest in self._guests for work in self._receive([_signal()], guest, READ + slot)]

        def move() -> None:
            for segment, work in zip(segments, arriving, strict=False):
                work.wait()
                leaving.extend(self._send([segment], self._after, BYTES + slot))
            for guest in self._guests:
                leaving.extend(self._send([_signal()], guest, HERE + slot))
            _wait(leaving)
            if self._before is None:  # the trainer does not read, so its buffer is free when its guests have
                _wait(read)

        return move, lambda: _wait(read)

    def _follow(self, slot: int) -> tuple[Callable[[], None], Callable[[], None]]:
        """The steps of a guest: wait until the bytes are in the head's memory; say that they were read."""
        here = self._receive([_signal()], self._head, HERE + slot)
        return lambda: _wait(here), lambda: _wait(self._send([_signal()], self._head, READ + slot))

    def _send(self, parts: Sequence["torch.Tensor"], rank: int | None, tag: int) -> list["_Work"]:
        return [] if rank is None else [_Work(self._group.send([part], rank, tag), part) for part in parts]

    def _receive(self, parts: Sequence["torch.Tensor"], rank: int | None, tag: int) -> list["_Work"]:
        return [] if rank is None else [_Work(self._group.recv([part], rank, tag), part) for part in parts]

    def _failed(self, what: str, error: RuntimeError) -> SyncError:
        return self._members.failure(f"gloo, {what}", error)


class _Work:
    """A send or a receive of gloo, with the memory that it uses until it ends."""

    def __init__(self, work: Any, memory: "torch.Tensor") -> None:
        self._work, self._memory = work, memory

    def wait(self) -> None:
        """Until it has ended; RuntimeError at the deadline."""
        self._work.wait()


def _signal() -> "torch.Tensor":
    """A message that says no more than that it came."""
    import torch

    return torch.zeros(1, dtype=torch.uint8)


def _wait(works: Sequence[_Work]) -> None:
    for work in works:
        work.wait()
