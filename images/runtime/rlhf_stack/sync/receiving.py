"""An engine worker's side of a sync: a bucket is loaded while the next one arrives."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_stack.sync.buckets import Bucket, ParameterSpec, plan_buckets
from rlhf_stack.sync.errors import SyncError
from rlhf_stack.sync.group import SLOTS, WeightGroup

if TYPE_CHECKING:
    import torch

Load = Callable[[list[tuple[str, "torch.Tensor"]]], Any]


def receive(
    group: WeightGroup, content: Sequence[Sequence[Any]], limit: int, device: Any, load: Load, dtype: Any
) -> dict[str, Any]:
    """Receive the parameters that `sending.send` sends and pass them to ``load`` bucket by bucket.

    ``content`` are the fields of each `ParameterSpec`, ``dtype`` is the engine's. ``load`` gets names and
    tensors on ``device``, valid until it returns. Returns ``rank`` (in the group), ``who`` (rank and node,
    for logs), ``seconds`` in total, and of these the seconds ``loading`` and ``waiting``.
    """
    start = time.monotonic()
    waiting = loading = 0.0
    with group.syncing():
        specs = [ParameterSpec(name, kind, tuple(shape), size) for name, kind, shape, size in content]
        _refuse_other_dtypes(specs, dtype)
        buckets = plan_buckets(specs, limit)
        arriving = [_start(group, number, bucket) for number, bucket in enumerate(buckets[:SLOTS])]
        for number, bucket in enumerate(buckets):
            before = time.monotonic()
            buffer, transfer = arriving.pop(0)
            transfer.finish()
            waiting += (arrived := time.monotonic()) - before
            load(_views(buffer.to(device), bucket, specs))
            loading += time.monotonic() - arrived
            transfer.release()
            if number + SLOTS < len(buckets):
                arriving.append(_start(group, number + SLOTS, buckets[number + SLOTS]))
    seconds = time.monotonic() - start
    return {
        "rank": group.rank,
        "who": group.describe(group.rank),
        "seconds": seconds,
        "loading": loading,
        "waiting": waiting,
    }


def _refuse_other_dtypes(specs: Iterable[ParameterSpec], dtype: Any) -> None:
    """Raise `SyncError`, as upstream does, for a parameter that the engine's ``dtype`` would round."""
    expected = str(dtype).removeprefix("torch.")
    for spec in specs:
        if spec.dtype != expected:
            raise SyncError(
                f"{spec.name} is {spec.dtype} in the trainer and {expected} in the engine: "
                "train in the engine's dtype"
            )


def _start(group: WeightGroup, number: int, bucket: Bucket) -> tuple["torch.Tensor", Any]:
    buffer = group.buffers.for_bucket(bucket.size, number)
    parts = [buffer[spans[0].begin : spans[-1].end] for spans in bucket.parts()]
    return buffer, group.start(parts, bucket.title)


def _views(
    buffer: "torch.Tensor", bucket: Bucket, specs: Sequence[ParameterSpec]
) -> list[tuple[str, "torch.Tensor"]]:
    import torch

    views = []
    for span in bucket.spans:
        spec = specs[span.index]
        values = buffer[span.begin : span.end].view(getattr(torch, spec.dtype))
        views.append((spec.name, values.view(spec.shape)))
    return views
