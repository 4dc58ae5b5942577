"""Packing of a bucket's tensors into the parts that are sent."""

from collections.abc import Sequence
from typing import Protocol

from rlhf_stack.lazy import torch
from rlhf_stack.sync.buckets import Bucket, Span


class Memory(Protocol):
    """Where buckets are packed: a group's `Buffers`, or what it `Kept`."""

    def for_bucket(self, size: int, number: int) -> "torch.Tensor":
        """Return ``size`` bytes (uint8) for bucket ``number``."""


class Packer:
    """Packs tensors into ``memory``; with ``in_place``, large ones on ``device`` are parts without a copy."""

    def __init__(self, memory: Memory, device: "torch.device", in_place: bool) -> None:
        self._memory, self._device, self._in_place = memory, device, in_place

    def parts(self, number: int, bucket: Bucket, tensors: Sequence["torch.Tensor"]) -> list["torch.Tensor"]:
        """Return the bytes of each of ``bucket.parts()``; ``tensors`` are those of its spans."""
        sources = dict(zip(bucket.spans, tensors, strict=True))
        return [self._part(number, bucket, spans, sources) for spans in bucket.parts()]

    def _part(
        self, number: int, bucket: Bucket, spans: tuple[Span, ...], sources: dict[Span, "torch.Tensor"]
    ) -> "torch.Tensor":
        if self._in_place and len(spans) == 1:
            whole = sources[spans[0]]
            if whole.is_contiguous() and whole.device == self._device:
                start = spans[0].start
                return as_bytes(whole)[start : start + spans[0].size]
        buffer = self._memory.for_bucket(bucket.size, number)
        for span in spans:
            source = sources[span]
            view = buffer[span.begin : span.end].view(source.dtype)
            if len(view) < source.numel():
                source = source.reshape(-1).narrow(0, span.start // source.element_size(), len(view))
            view.view(source.shape).copy_(source, non_blocking=self._device.type != "cpu")
        return buffer[spans[0].begin : spans[-1].end]


def as_bytes(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return the memory of a contiguous tensor as one-dimensional uint8."""
    return tensor.detach().reshape(-1).view(torch.uint8)
