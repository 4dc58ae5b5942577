"""An engine worker's side of a sync: a bucket is loaded while the next one arrives."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_stack.sync.buckets import Bucket, Parameter, plan
from rlhf_stack.sync.errors import SyncError
from rlhf_stack.sync.group import SLOTS, WeightGroup

if TYPE_CHECKING:
    import torch

Load = Callable[[list[tuple[str, "torch.Tensor"]]], Any]


def receive(
    group: WeightGroup, content: Sequence[Sequence[Any]], limit: int, device: Any, load: Load, dtype: Any
) -> dict[str, Any]:
    """Take the trainer's parameters as `sending.send` sends them, and hand them to ``load`` bucket by bucket.

    ``content`` are the fields of each `Parameter`, ``dtype`` is the engine's. ``load`` gets names and tensors
    on ``device``, which hold until it returns. The answer has ``rank`` (in the group), ``who`` (for people),
    ``seconds``, and of them ``loading`` and ``waiting``.
    """
    start = time.monotonic()
    waiting = loading = 0.0
    with group.syncing():
        described = [Parameter(name, kind, tuple(shape), size) for name, kind, shape, size in content]
        _refuse_other_dtypes(described, dtype)
        buckets = plan(described, limit)
        arriving = [_start(group, number, bucket) for number, bucket in enumerate(buckets[:SLOTS])]
        for number, bucket in enumerate(buckets):
            before = time.monotonic()
            held, transfer = arriving.pop(0)
            transfer.finish()
            waiting += (here := time.monotonic()) - before
            load(_views(held.to(device), bucket, described))
            loading += time.monotonic() - here
            transfer.release()
            if number + SLOTS < len(buckets):
                arriving.append(_start(group, number + SLOTS, buckets[number + SLOTS]))
    seconds = time.monotonic() - start
    return {
        "rank": group.rank,
        "who": group.who(group.rank),
        "seconds": seconds,
        "loading": loading,
        "waiting": waiting,
    }


def _refuse_other_dtypes(described: Iterable[Parameter], dtype: Any) -> None:
    """`SyncError` for a parameter that the engine, which computes in ``dtype``, would round (as upstream)."""
    wanted = str(dtype).removeprefix("torch.")
    for parameter in described:
        if parameter.dtype != wanted:
            raise SyncError(
                f"{parameter.name} is {parameter.dtype} in the trainer and {wanted} in the engine: "
                "train in the engine's dtype"
            )


def _start(group: WeightGroup, number: int, bucket: Bucket) -> tuple["torch.Tensor", Any]:
    content = group.buffers.first(bucket.size, number)
    parts = [content[part[0].begin : part[-1].end] for part in bucket.parts()]
    return content, group.start(parts, bucket.title)


def _views(
    content: "torch.Tensor", bucket: Bucket, described: Sequence[Parameter]
) -> list[tuple[str, "torch.Tensor"]]:
    import torch

    views = []
    for place in bucket.places:
        parameter = described[place.index]
        part = content[place.begin : place.end].view(getattr(torch, parameter.dtype))
        views.append((parameter.name, part.view(parameter.shape)))
    return views
