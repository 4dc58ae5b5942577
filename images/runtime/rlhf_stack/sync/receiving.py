"""An engine worker's side of a sync: a bucket is loaded while the next one arrives."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rlhf_stack.accelerator import devices
from rlhf_stack.lazy import torch
from rlhf_stack.sync.buckets import Bucket, ParameterSpec, plan_buckets
from rlhf_stack.sync.changed import arriving, kept_memory
from rlhf_stack.sync.encoding import CHANGED, FULL
from rlhf_stack.sync.errors import SyncError
from rlhf_stack.sync.group import SLOTS, Transfer, WeightGroup

Load = Callable[[list[tuple[str, "torch.Tensor"]]], Any]


def receive(
    group: WeightGroup,
    content: Sequence[Sequence[Any]],
    limit: int,
    device: Any,
    load: Load,
    dtype: Any,
    encoding: str = FULL,
    *,
    load_keeps: bool = False,
) -> dict[str, Any]:
    """Receive the parameters that `sending.send` sends and pass them to ``load`` bucket by bucket.

    ``content`` are the fields of each `ParameterSpec`, ``dtype`` is the engine's. ``load`` gets names and
    tensors on ``device``, valid until it returns; all memory that they used is free when this returns, except
    what ``encoding`` lets the node keep. With ``load_keeps`` the tensors are valid for as long as ``load``
    refers to them. Returns ``rank`` (in the group), ``who`` (rank and node, for logs), ``seconds`` in total,
    and of these the seconds ``loading`` and ``waiting``.
    """

    def take(buffer: "torch.Tensor") -> "torch.Tensor":
        received = buffer.to(device)
        return buffer.clone() if load_keeps and received is buffer else received

    start = time.monotonic()
    loading = 0.0
    with group.syncing():
        specs = [ParameterSpec(name, kind, tuple(shape), *rest) for name, kind, shape, *rest in content]
        _refuse_other_dtypes(specs, dtype)
        buckets = plan_buckets(specs, limit)
        assembler = Assembler(specs, device)
        for bucket, received in _arriving(group, encoding, buckets, take):
            arrived = time.monotonic()
            if tensors := assembler.add(received, bucket):
                load(tensors)
            del received, tensors
            loading += time.monotonic() - arrived
    devices.empty_cache()
    seconds = time.monotonic() - start
    return {
        "rank": group.rank,
        "who": group.describe(group.rank),
        "seconds": seconds,
        "loading": loading,
        "waiting": seconds - loading,
    }


def _arriving(
    group: WeightGroup,
    encoding: str,
    buckets: Sequence[Bucket],
    take: Callable[["torch.Tensor"], "torch.Tensor"],
) -> Iterator[tuple[Bucket, "torch.Tensor"]]:
    """Yield each bucket and what ``take`` returns for its bytes: themselves, or a copy.

    The caller has read a bucket when it asks for the next one. The memory of one that was copied is free at
    once for the next bucket.
    """
    if encoding == CHANGED:
        yield from ((bucket, take(buffer)) for bucket, buffer in arriving(group, buckets))
        return
    memory = kept_memory(group, encoding, buckets) or group.buffers

    def start(number: int) -> "tuple[torch.Tensor, Transfer]":
        bucket = buckets[number]
        buffer = memory.for_bucket(bucket.size, number)
        parts = [buffer[spans[0].begin : spans[-1].end] for spans in bucket.parts()]
        return buffer, group.start(parts, bucket.title)

    def release(read: Transfer, number: int) -> None:
        read.release()
        if number + SLOTS < len(buckets):
            started.append(start(number + SLOTS))

    started = [start(number) for number in range(min(SLOTS, len(buckets)))]
    for number, bucket in enumerate(buckets):
        buffer, transfer = started.pop(0)
        transfer.finish()
        received = take(buffer)
        if is_copy := received is not buffer:
            release(transfer, number)
        yield bucket, received
        del received, buffer
        if not is_copy:
            release(transfer, number)


def _refuse_other_dtypes(specs: Iterable[ParameterSpec], dtype: Any) -> None:
    """Raise `SyncError`, as upstream does, for a parameter that the engine's ``dtype`` would round."""
    expected = str(dtype).removeprefix("torch.")
    for spec in specs:
        if spec.dtype != expected:
            raise SyncError(
                f"{spec.name} is {spec.dtype} in the trainer and {expected} in the engine: "
                "train in the engine's dtype"
            )


class Assembler:
    """Makes parameters of buckets; one that is split over several is assembled in memory of its own."""

    def __init__(self, specs: Sequence[ParameterSpec], device: Any) -> None:
        self._specs, self._device = specs, device
        self._whole: torch.Tensor | None = None  # at most one parameter is split at a time

    def add(self, buffer: "torch.Tensor", bucket: Bucket) -> list[tuple[str, "torch.Tensor"]]:
        """Return names and tensors of the parameters that end in ``bucket``, whose bytes are ``buffer``."""
        tensors = []
        for span in bucket.spans:
            spec, content = self._specs[span.index], buffer[span.begin : span.end]
            if span.size < spec.size:
                if self._whole is None:
                    self._whole = torch.empty(spec.size, dtype=torch.uint8, device=self._device)
                end = span.start + span.size
                self._whole[span.start : end].copy_(content)
                if end < spec.size:
                    continue
                content, self._whole = self._whole, None
            tensors.append((spec.name, content.view(getattr(torch, spec.dtype)).view(spec.shape)))
        return tensors
