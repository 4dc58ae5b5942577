"""The interface of a sync group, whichever backend transports the bytes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from rlhf_stack.lazy import torch
from rlhf_stack.sync.encoding import Encodings
from rlhf_stack.sync.kept import Kept

SLOTS = 2  # concurrent transfers, and buffers per process

Watch = Callable[[], None]  # raises an error of which the ranks of a group do not learn from each other


def unwatched() -> None:
    """Return: nothing but the group's own ranks can end a sync."""


class Transfer(Protocol):
    """A transfer in progress, in the background."""

    def finish(self) -> None:
        """Wait until the bytes have arrived or are sent; `SyncError` names the cause if they are late."""

    def release(self) -> None:
        """Signal, on a receiving rank after `finish`, that the bytes were read and their buffer is free."""


class WeightGroup(Protocol):
    """A sync group; rank 0 is the trainer, the others are engine workers."""

    name: str
    rank: int
    device: Any  # of the tensors that `start` takes
    buffers: "Buffers"
    in_place: bool  # whether `start` accepts memory other than `buffers`
    answers: dict[int, dict[str, Any]]  # the engines' results of the last sync (rank 0)
    encodings: Encodings  # of its syncs (rank 0)
    kept: Kept | None  # None: this backend cannot send changed elements
    selection: str  # why `auto` selected this backend, "" if it was requested

    def broadcast(self, tensor: "torch.Tensor", src: int, stream: Any) -> None:
        """Copy rank ``src``'s ``tensor`` into that of all other ranks: upstream's call, for one parameter."""

    def start(self, parts: Sequence["torch.Tensor"], what: str) -> Transfer:
        """Start to send ``parts`` from rank 0 to all others; at most `SLOTS` transfers run at a time.

        ``parts`` are one-dimensional uint8 tensors of the same sizes on every rank, and must not change until
        the transfer ends. ``what`` names the transfer in errors.
        """

    def syncing(self, watch: Watch = unwatched) -> AbstractContextManager[None]:
        """Return the context of one sync: when it exits, its result is reported to the other ranks.

        ``watch`` is called while a transfer lasts; what it raises ends the sync.
        """

    def raise_failure(self) -> None:
        """Raise `SyncError`, which names the cause, if a rank has published the cause of a failed sync."""

    def describe(self, rank: int) -> str:
        """Return a rank's number and node, for logs and errors."""

    def close(self) -> None:
        """Abort what is in progress and release connections and memory; the group cannot be used again."""


@contextmanager
def released_after(sync: AbstractContextManager[None], buffers: "Buffers") -> Iterator[None]:
    """Return the context ``sync``, which releases ``buffers`` if it ends without an error.

    After an error, a transfer that still runs may use them.
    """
    with sync:
        yield
        buffers.release()


class Buffers:
    """A process's `SLOTS` buffers of one sync, each of the size of its largest bucket."""

    def __init__(self, device: Any, pinned: bool) -> None:
        self._options = {"device": device, "pin_memory": pinned}
        self._tensors: dict[int, torch.Tensor] = {}

    def for_bucket(self, size: int, number: int) -> "torch.Tensor":
        """Return ``size`` bytes (uint8) for bucket ``number``; consecutive buckets have different memory."""
        index = number % SLOTS
        if index not in self._tensors or self._tensors[index].numel() < size:
            self._tensors.pop(index, None)  # free the old buffer before the new one is allocated
            self._tensors[index] = self._new(size, index)
        return self._tensors[index][:size]

    def release(self) -> None:
        """Free the memory after a sync: engines have measured the free memory without it."""
        self._tensors.clear()

    def close(self) -> None:
        """Free the memory and what it is made of; the buffers cannot be used again."""
        self.release()

    def _new(self, size: int, index: int) -> "torch.Tensor":  # noqa: ARG002
        """Allocate ``size`` bytes for slot ``index``."""
        return torch.empty(size, dtype=torch.uint8, **self._options)
