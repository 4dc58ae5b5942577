"""A sync group over gloo, which sends bytes from host to host, for every dtype and accelerator."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

from rlhf_stack.accelerator import devices
from rlhf_stack.config import env_vars
from rlhf_stack.lazy import torch
from rlhf_stack.sync.background import Background
from rlhf_stack.sync.buckets import chain_order
from rlhf_stack.sync.encoding import Encodings
from rlhf_stack.sync.errors import SyncError
from rlhf_stack.sync.group import SLOTS, Buffers, Watch, released_after, unwatched
from rlhf_stack.sync.kept import Kept
from rlhf_stack.sync.membership import Members, ended, gloo_device
from rlhf_stack.sync.node_shared_memory import share_node_buffers

SEGMENT = 4 << 20  # bytes that a rank receives before it forwards them
THREADS = 2
DATA, READY, READ = 0, SLOTS, 2 * SLOTS  # the first tag of each kind of message; one tag per slot


class GlooTransfer:
    """A transfer that gloo's threads send, receive or forward, or that is read from shared memory."""

    def __init__(
        self,
        finishing: Callable[[], None],
        releasing: Callable[[], None],
        members: Members,
        failure: Callable[[RuntimeError], SyncError],
    ) -> None:
        self._finishing, self._releasing = Background(finishing), releasing
        self._members, self._failure = members, failure

    def finish(self) -> None:
        """See `Transfer`."""
        self._wait_for_step(self._finishing)

    def release(self) -> None:
        """See `Transfer`."""
        self._wait_for_step(Background(self._releasing))

    def _wait_for_step(self, step: Background[None]) -> None:
        self._members.wait_for_transfer(ended(step), self._failure)


class GlooGroup:
    """A gloo group over its own store. A GPU's weights are sent from host memory.

    Between nodes, ranks forward the bytes in a chain: gloo's broadcast is a tree, in which the trainer's link
    would carry the weights once per branch. On each node one rank, the leader, receives them into memory that
    the other ranks, its followers, read.
    """

    name = "gloo"
    selection = ""

    def __init__(self, members: Members) -> None:
        self.rank, self.describe, self._members = members.rank, members.describe, members
        self.answers: dict[int, dict[str, Any]] = {}
        self.device = torch.device("cpu")
        self.kept: Kept | None
        leaders, shared, self.kept = share_node_buffers(members)
        self.in_place = shared is None
        self.buffers = shared or Buffers(self.device, pinned=devices.is_gpu())
        self._leader = leaders[self.rank]
        self._followers = [rank for rank, leader in enumerate(leaders) if leader == self.rank != rank]
        self.leads = self._leader == self.rank
        self.encodings = Encodings(len(set(leaders)) - 1)
        order = [rank for rank in chain_order(members.addresses) if leaders[rank] == rank]
        position = order.index(self._leader)
        self._previous = order[position - 1] if position else None
        self._next = order[position + 1] if position + 1 < len(order) else None
        self._started = 0
        connecting = Background(lambda: _connect(members))
        end = time.monotonic() + env_vars.sync_timeout()
        members.wait_for_transfer(
            ended(connecting, end), lambda error: members.failure(_connecting(members), error)
        )
        self._group: Any = connecting.result()

    def broadcast(self, tensor: "torch.Tensor", src: int, stream: Any) -> None:  # noqa: ARG002
        """See `WeightGroup`."""
        from torch.distributed import BroadcastOptions

        if tensor.numel() == 0:
            return
        content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        what = f"broadcast of {content.numel()} bytes from {self.describe(src)}"
        try:
            self._group.broadcast([content], options).wait()
        except RuntimeError as error:
            raise self._failure(what, error) from error
        if self.rank != src:
            tensor.copy_(content.view(tensor.dtype).reshape(tensor.shape))

    def start(
        self, parts: Sequence["torch.Tensor"], what: str, arrived: Callable[[], None] | None = None
    ) -> GlooTransfer:
        """See `WeightGroup`. On a rank that ``leads``, ``arrived`` is called before its followers read.

        Other ranks need no ``parts``.
        """
        self._started += 1
        slot = self._started % SLOTS
        try:
            steps = self._lead(parts, slot, arrived) if self.leads else self._follow(slot)
        except RuntimeError as error:
            raise self._failure(what, error) from error
        return GlooTransfer(*steps, self._members, lambda error: self._failure(what, error))

    def syncing(self, watch: Watch = unwatched) -> AbstractContextManager[None]:
        """See `WeightGroup`."""
        return released_after(self._members.syncing(watch), self.buffers)

    def raise_failure(self) -> None:
        """See `WeightGroup`."""
        self._members.raise_failure()

    def close(self) -> None:
        """See `WeightGroup`: gloo closes its connections when nothing refers to the group."""
        self._group = None
        self.buffers.close()
        if self.kept is not None:
            self.kept.close()

    def _lead(
        self, parts: Sequence["torch.Tensor"], slot: int, arrived: Callable[[], None] | None
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return a leader's steps: receive, forward, signal the followers; then wait until they have read."""
        segments = [segment for part in parts for segment in part.split(SEGMENT) if segment.numel()]
        receives = self._receive(segments, self._previous, DATA + slot)
        sends = [] if receives else self._send(segments, self._next, DATA + slot)
        reads = [work for rank in self._followers for work in self._receive([_signal()], rank, READ + slot)]

        def finish() -> None:
            for segment, work in zip(segments, receives, strict=False):
                work.wait()
                sends.extend(self._send([segment], self._next, DATA + slot))
            if arrived is not None:
                arrived()
            for rank in self._followers:
                sends.extend(self._send([_signal()], rank, READY + slot))
            _wait_all(sends)
            if self._previous is None:  # the trainer reads nothing: its buffer is free when followers have
                _wait_all(reads)

        return finish, lambda: _wait_all(reads)

    def _follow(self, slot: int) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return a follower's steps: wait until the leader has the bytes; then signal that they were read."""
        ready = self._receive([_signal()], self._leader, READY + slot)
        return (
            lambda: _wait_all(ready),
            lambda: _wait_all(self._send([_signal()], self._leader, READ + slot)),
        )

    def _send(self, parts: Sequence["torch.Tensor"], rank: int | None, tag: int) -> list["_Work"]:
        return [] if rank is None else [_Work(self._group.send([part], rank, tag), part) for part in parts]

    def _receive(self, parts: Sequence["torch.Tensor"], rank: int | None, tag: int) -> list["_Work"]:
        return [] if rank is None else [_Work(self._group.recv([part], rank, tag), part) for part in parts]

    def _failure(self, what: str, error: RuntimeError) -> SyncError:
        return self._members.failure(f"gloo, {what}", error)


def _connect(members: Members) -> Any:
    """Return gloo's process group, which has connected to all ranks."""
    import torch.distributed as dist

    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=env_vars.sync_timeout() - env_vars.sync_grace())
    options._threads = THREADS
    try:
        options._devices = [gloo_device(members.address)]
    except RuntimeError as error:
        raise members.own_error(
            f"gloo, listening at {members.address}",
            error,
            "ranks must reach each other at their nodes' own addresses, without NAT: start Ray with such an "
            "address, or set GLOO_SOCKET_IFNAME on every node",
        ) from error
    return dist.ProcessGroupGloo(
        dist.PrefixStore("gloo", members.connect_to_store()), members.rank, members.world, options
    )


def _connecting(members: Members) -> str:
    addresses = ", ".join(dict.fromkeys(members.addresses))
    return f"connecting to the other ranks by gloo, each at its own address ({addresses}; no NAT)"


class _Work:
    """A send or a receive of gloo, with a reference to the memory that it uses until it ends."""

    def __init__(self, work: Any, memory: "torch.Tensor") -> None:
        self._work, self._memory = work, memory

    def wait(self) -> None:
        """Wait until it has ended; RuntimeError at the deadline."""
        self._work.wait()


def _signal() -> "torch.Tensor":
    """Return a message whose arrival is its only content."""
    return torch.zeros(1, dtype=torch.uint8)


def _wait_all(works: Sequence[_Work]) -> None:
    for work in works:
        work.wait()
