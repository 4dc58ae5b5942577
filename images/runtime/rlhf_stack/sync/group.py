"""What a sync group is, whatever carries the bytes."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

SLOTS = 2  # transfers on their way at a time, and buffers of a process


class Transfer(Protocol):
    """Bytes on their way, in the background."""

    def finish(self) -> None:
        """Until the bytes are there, or sent; `SyncError` says who is to blame if they are not in time."""

    def release(self) -> None:
        """After `finish`, on a rank that received: the bytes were read, their buffer may be used again."""


class WeightGroup(Protocol):
    """Rank 0 is the trainer; the others are engine workers."""

    name: str
    rank: int
    device: Any  # where `start` wants its bytes
    buffers: "Buffers"
    in_place: bool  # whether `start` takes bytes from anywhere, and not only from `buffers`
    answers: list[dict[str, Any]]  # of the engines, to the last sync (rank 0)

    def broadcast(self, tensor: "torch.Tensor", src: int, stream: Any) -> None:
        """Fill ``tensor`` on every rank with that of rank ``src``: upstream's call, for one parameter."""

    def start(self, parts: Sequence["torch.Tensor"], what: str) -> Transfer:
        """Begin to send ``parts`` from rank 0 to all others; at most `SLOTS` transfers are on their way.

        ``parts`` are one-dimensional uint8, of the same sizes on every rank, and must stay as they are until
        the transfer ends. ``what`` is for errors.
        """

    def syncing(self) -> AbstractContextManager[None]:
        """Around one sync, so that every rank knows how it ended for the others."""

    def who(self, rank: int) -> str:
        """A rank by its number and node."""


class Buffers:
    """Two buffers of a process, kept from sync to sync; each grows to the largest bucket."""

    def __init__(self, device: Any, pinned: bool) -> None:
        self._options = {"device": device, "pin_memory": pinned}
        self._held: dict[int, torch.Tensor] = {}

    def first(self, size: int, number: int) -> "torch.Tensor":
        """``size`` bytes (uint8) for bucket ``number``; two buckets that follow each other share none."""
        index = number % SLOTS
        if index not in self._held or self._held[index].numel() < size:
            self._held.pop(index, None)  # the old one goes before the new one comes
            self._held[index] = self._new(size, index)
        return self._held[index][:size]

    def _new(self, size: int, index: int) -> "torch.Tensor":  # noqa: ARG002
        """``size`` bytes for slot ``index``."""
        import torch

        return torch.empty(size, dtype=torch.uint8, **self._options)
