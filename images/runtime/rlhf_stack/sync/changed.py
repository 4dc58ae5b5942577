"""A sync that sends changed elements: all nodes update what they keep, and engines load parameters from it.

The messages of `rlhf_stack.sync.delta` differ in size, so each announces the size of the next one.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from rlhf_stack.lazy import torch
from rlhf_stack.sync import delta
from rlhf_stack.sync.buckets import Bucket
from rlhf_stack.sync.encoding import KEPT
from rlhf_stack.sync.errors import SyncError
from rlhf_stack.sync.group import SLOTS, Transfer
from rlhf_stack.sync.kept import Kept
from rlhf_stack.sync.packing import Packer

FIRST = "the size of the first message"


class ChangedSender:
    """The trainer's side; ``group``, a `GlooGroup`, keeps the bytes of the last sync of ``buckets``."""

    def __init__(self, group: Any, buckets: Sequence[Bucket], in_place: bool) -> None:
        _expect_kept(group, buckets)
        self._group, self._packer = group, Packer(group.buffers, group.device, in_place)
        self._in_flight: list[Transfer] = []
        self._pending, self._title = delta.head(), FIRST
        self.sent = 0

    def send(self, number: int, bucket: Bucket, tensors: Sequence["torch.Tensor"]) -> None:
        """Send what changed in ``tensors``, those of bucket ``number``."""
        width = min(delta.WIDEST, *(tensor.element_size() for tensor in tensors))
        begins = [spans[0].begin for spans in bucket.parts()]
        parts = [part.numpy() for part in self._packer.parts(number, bucket, tensors)]
        kept = self._group.kept.for_bucket(bucket.size, number).numpy()
        message = delta.changes(kept, zip(begins, parts, strict=True), width)
        delta.announce(self._pending, message)
        self._start()
        self._pending, self._title = message, bucket.title

    def finish(self) -> None:
        """Wait until all messages are sent."""
        self._start()
        for transfer in self._in_flight:
            transfer.finish()
        self._in_flight.clear()

    def _start(self) -> None:
        if len(self._in_flight) == SLOTS:
            self._in_flight.pop(0).finish()
        self.sent += len(self._pending)
        self._in_flight.append(self._group.start([torch.from_numpy(self._pending)], self._title))


def arriving(group: Any, buckets: Sequence[Bucket]) -> Iterator[tuple[Bucket, "torch.Tensor"]]:
    """Yield each bucket and its bytes, updated, on a worker of ``group``, a `GlooGroup`.

    The caller has read a bucket when it asks for the next one.
    """
    _expect_kept(group, buckets)

    def start(number: int, message: "torch.Tensor") -> tuple["torch.Tensor", Transfer]:
        bucket = buckets[number]
        size = delta.next_size(message.numpy()) if group.leads else delta.HEAD.size
        following, kept = torch.zeros(size, dtype=torch.uint8), group.kept.for_bucket(bucket.size, number)
        update = functools.partial(delta.apply, following.numpy(), kept.numpy())
        return following, group.start([following], bucket.title, update)

    head = torch.zeros(delta.HEAD.size, dtype=torch.uint8)
    before = group.start([head], FIRST)
    before.finish()
    message, transfer = start(0, head)
    before.release()
    for number, bucket in enumerate(buckets):
        transfer.finish()
        before = transfer
        if number + 1 < len(buckets):
            message, transfer = start(number + 1, message)
        yield bucket, group.kept.for_bucket(bucket.size, number)
        before.release()


def kept_memory(group: Any, encoding: str, buckets: Sequence[Bucket]) -> Kept | None:
    """Return where this rank of ``group`` must put the bytes of a sync of all weights, None if nowhere."""
    if encoding == KEPT:
        group.kept.keep(buckets)
        kept: Kept = group.kept
        return kept
    if group.kept is not None:
        group.kept.release()
    return None


def _expect_kept(group: Any, buckets: Sequence[Bucket]) -> None:
    if not group.kept.holds(buckets):
        raise SyncError(f"{group.describe(group.rank)} keeps no weights to which changes could be applied")
