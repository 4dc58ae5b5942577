"""An engine worker's side of a sync: a bucket is loaded while the next one arrives."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

from rlhf_stack.accelerator import devices
from rlhf_stack.cluster.host import available_memory
from rlhf_stack.lazy import torch
from rlhf_stack.sync.buckets import Bucket, ParameterSpec, Share, Span, plan_buckets
from rlhf_stack.sync.changed import arriving, kept_memory
from rlhf_stack.sync.encoding import CHANGED, FULL
from rlhf_stack.sync.errors import SyncError
from rlhf_stack.sync.group import SLOTS, Transfer, WeightGroup
from rlhf_stack.sync.reads import Reads

Tensors = list[tuple[str, "torch.Tensor"]]
Load = Callable[[Tensors], Any]
Take = Callable[["torch.Tensor", Bucket], tuple[Tensors, bool]]  # tensors, and whether they are copies


def receive(
    groups: Sequence[WeightGroup],
    content: Sequence[Sequence[Any]],
    limit: int,
    device: Any,
    load: Load,
    dtype: Any,
    encoding: str = FULL,
    *,
    load_keeps: bool = False,
    reads: Reads | None = None,
    held: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Receive the parameters that `sending.send` sends and pass them to ``load`` bucket by bucket.

    ``groups`` are those of the trainer ranks that send, each its `Share` of the buckets.
    ``content`` are the fields of each `ParameterSpec`, ``dtype`` is the engine's, and ``held`` are those of
    parameters that it holds in another one, see `weight_layout.other_dtypes`. ``load`` gets names and
    tensors on ``device``, valid until it returns; all memory that they used is free when this returns, except
    what ``encoding`` lets the node keep. With ``load_keeps`` the tensors are valid for as long as ``load``
    refers to them, and only their elements that ``reads`` needs are copied. Returns ``rank`` (in the group),
    ``who`` (rank and node, for logs), ``seconds`` in total, of these the seconds ``loading`` and ``waiting``,
    the bytes ``copied`` from where they arrived, and those of ``memory_left`` on this node.
    """
    start = time.monotonic()
    loading = 0.0
    with ExitStack() as syncs:
        _begin(syncs, groups)
        specs = [ParameterSpec(name, kind, tuple(shape), *rest) for name, kind, shape, *rest in content]
        _refuse_other_dtypes(specs, dtype, held or {})
        buckets = plan_buckets(specs, limit)
        if reads is not None:
            reads.begin(specs)
        assembler = Assembler(specs, device, load_keeps, reads)
        count = Share(count=len(groups)).of(len(buckets)).count
        streams = [
            _arriving(group, encoding, buckets[index::count], assembler.take)
            for index, group in enumerate(groups[:count])
        ]
        for tensors in _in_turn(streams):
            arrived = time.monotonic()
            if tensors:
                with nullcontext() if reads is None else reads.recorded(tensors):
                    load(tensors)
            del tensors
            loading += time.monotonic() - arrived
    devices.empty_cache()
    seconds = time.monotonic() - start
    return {
        "rank": groups[0].rank,
        "who": groups[0].describe(groups[0].rank),
        "seconds": seconds,
        "loading": loading,
        "waiting": seconds - loading,
        "copied": assembler.copied,
        "memory_left": available_memory(),
    }


def _begin(syncs: ExitStack, groups: Sequence[WeightGroup]) -> None:
    """Begin a sync of each group in ``syncs``; raise the first error once all have begun.

    A group's other ranks learn the cause only in a sync that this rank has begun; without, they wait for the
    deadline. What a rank publishes in one group ends the transfers of the others too: only rank 0 of the
    trainer learns that an engine is lost, and other sources wait for that engine.
    """

    def watch(own: WeightGroup) -> None:
        for group in groups:
            if group is not own:
                group.raise_failure()

    errors = []
    for group in groups:
        try:
            syncs.enter_context(group.syncing(partial(watch, group)))
        except SyncError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _in_turn(streams: Sequence[Iterator[Tensors]]) -> Iterator[Tensors]:
    """Yield the next of each stream in turn until all have ended."""
    pending = list(streams)
    while pending:
        for stream in list(pending):
            tensors = next(stream, None)
            if tensors is None:
                pending.remove(stream)
                continue
            yield tensors
            del tensors  # before its bucket's memory is used for the next one


def _arriving(group: WeightGroup, encoding: str, buckets: Sequence[Bucket], take: Take) -> Iterator[Tensors]:
    """Start to receive ``buckets``; return an iterator of what ``take`` returns for each.

    The caller has read the tensors of one when it asks for the next.
    """
    if encoding == CHANGED:
        return (take(buffer, bucket)[0] for bucket, buffer in arriving(group, buckets))
    memory = kept_memory(group, encoding, buckets) or group.buffers

    def start(number: int) -> "tuple[torch.Tensor, Transfer]":
        bucket = buckets[number]
        buffer = memory.for_bucket(bucket.size, number)
        parts = [buffer[spans[0].begin : spans[-1].end] for spans in bucket.parts()]
        return buffer, group.start(parts, bucket.title)

    started = [start(number) for number in range(min(SLOTS, len(buckets)))]
    return _loaded(buckets, started, start, take)


def _loaded(
    buckets: Sequence[Bucket],
    started: list["tuple[torch.Tensor, Transfer]"],
    start: Callable[[int], "tuple[torch.Tensor, Transfer]"],
    take: Take,
) -> Iterator[Tensors]:
    """See `_arriving`. The memory of a bucket that ``take`` has copied is free at once for the next one."""

    def release(read: Transfer, number: int) -> None:
        read.release()
        if number + SLOTS < len(buckets):
            started.append(start(number + SLOTS))

    for number, bucket in enumerate(buckets):
        buffer, transfer = started.pop(0)
        transfer.finish()
        tensors, are_copies = take(buffer, bucket)
        del buffer
        if are_copies:
            release(transfer, number)
        yield tensors
        del tensors
        if not are_copies:
            release(transfer, number)


def _refuse_other_dtypes(specs: Iterable[ParameterSpec], dtype: Any, held: Mapping[str, str]) -> None:
    """Raise `SyncError`, as upstream does, for a parameter that the engine's ``dtype`` would round."""
    expected = str(dtype).removeprefix("torch.")
    for spec in specs:
        if spec.dtype not in (expected, held.get(spec.name)):
            raise SyncError(
                f"{spec.name} is {spec.dtype} in the trainer and {expected} in the engine: "
                "train in the engine's dtype"
            )


class Assembler:
    """Makes parameters of buckets; one that is split over several is assembled in memory of its own.

    With ``keeps`` the tensors are copies in any case. ``copied`` counts the bytes of copies.
    """

    def __init__(
        self, specs: Sequence[ParameterSpec], device: Any, keeps: bool = False, reads: Reads | None = None
    ) -> None:
        self._specs, self._device, self._keeps = specs, device, keeps
        self._reads = reads if reads is not None and reads.is_known else None
        self._whole: torch.Tensor | None = None  # at most one parameter is split at a time
        self.copied = 0

    def take(self, buffer: "torch.Tensor", bucket: Bucket) -> tuple[Tensors, bool]:
        """Return names and tensors of the parameters that end in ``bucket``, whose bytes are ``buffer``.

        Also whether they are copies.
        """
        tensors = []
        is_split = all(span.size < self._specs[span.index].size for span in bucket.spans)
        memory = buffer if is_split else self._memory(buffer)
        for span in bucket.spans:
            spec, content = self._specs[span.index], memory[span.begin : span.end]
            if span.size < spec.size:
                if self._whole is None:
                    self._whole = torch.empty(spec.size, dtype=torch.uint8, device=self._device)
                end = span.start + span.size
                self._copy(span, buffer, self._whole[span.start : end])
                if end < spec.size:
                    continue
                content, self._whole = self._whole, None
            elif self._reads is not None:
                self._copy(span, buffer, content)
            tensors.append((spec.name, content.view(getattr(torch, spec.dtype)).view(spec.shape)))
        return tensors, is_split or memory is not buffer

    def _memory(self, buffer: "torch.Tensor") -> "torch.Tensor":
        """Return where parameters of ``buffer`` are: there, in a copy, or in memory without content yet."""
        if self._reads is not None:
            return torch.empty(len(buffer), dtype=torch.uint8, device=self._device)
        memory = buffer.to(self._device)
        memory = buffer.clone() if self._keeps and memory is buffer else memory
        self.copied += 0 if memory is buffer else len(buffer)
        return memory

    def _copy(self, span: Span, buffer: "torch.Tensor", target: "torch.Tensor") -> None:
        """Copy a span's bytes from the bucket ``buffer``, or those of elements that the loader needs."""
        spec, source = self._specs[span.index], buffer[span.begin : span.end]
        needed = None if self._reads is None else self._reads.needed(spec)
        if needed is None:
            target.copy_(source)
            self.copied += span.size
            return
        dtype = getattr(torch, spec.dtype)
        source, target, begin = source.view(dtype), target.view(dtype), span.start // dtype.itemsize
        for view in needed:
            for part in view.within(begin, begin + len(source)):
                elements = part.select(source, source.storage_offset() - begin)
                part.select(target, target.storage_offset() - begin).copy_(elements)
                self.copied += part.count * dtype.itemsize
