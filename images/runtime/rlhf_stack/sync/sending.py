"""The trainer's side of a sync: a bucket is packed while the previous one is in flight."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from functools import partial
from typing import Any

from rlhf_stack.cluster.actor_registry import PeerError
from rlhf_stack.cluster.host import available_memory
from rlhf_stack.config import env_vars
from rlhf_stack.lazy import torch
from rlhf_stack.sync.actor_waits import raise_engine_error, wait_for_engine_results
from rlhf_stack.sync.buckets import Bucket, Share, linked_buckets, plan_buckets, total_bytes
from rlhf_stack.sync.changed import ChangedSender, kept_memory
from rlhf_stack.sync.encoding import CHANGED
from rlhf_stack.sync.engine_parameters import EngineParameter, engine_parameters, values
from rlhf_stack.sync.errors import SyncError
from rlhf_stack.sync.group import SLOTS, Transfer, WeightGroup
from rlhf_stack.sync.kept import Kept
from rlhf_stack.sync.nccl import StreamGroup
from rlhf_stack.sync.packing import Packer
from rlhf_stack.sync.trainer import (
    engine_indices,
    gathered,
    is_sharded,
    next_weight_version,
    own_group,
    own_share,
)


def send(trainer: Any, parameters: Sequence[tuple[str, Any]]) -> int:
    """Send ``parameters`` (names and tensors) of OpenRLHF's ``ActorPPOTrainer`` to its engines, in buckets.

    Adapters of LoRA are merged into the weights that are sent.

    Every trainer rank calls it with the same parameters: shards are gathered bucket by bucket. Rank 0 sends
    to all engines, or each rank its `Share`, or each rank to the engine worker on its GPU. Returns the bytes
    that this rank has sent. `SyncError` if they do not arrive.
    """
    sent = engine_parameters(trainer, parameters)
    specs = [each.spec(trainer) for each in sent]
    share = own_share(trainer)
    limit = env_vars.sync_bucket() // share.count  # engines have buffers for each rank that sends
    buckets = plan_buckets(specs, limit)
    share = share.of(len(buckets))
    group = own_group(trainer)
    content = [astuple(spec) for spec in specs]
    encoding = _encoding(group, share, content, total_bytes(specs))
    if group is None or share.index >= share.count:  # a rank that only helps to gather
        for linked in linked_buckets(buckets, specs):
            with _gathered(trainer, sent, linked):
                pass
        return 0
    is_root = torch.distributed.get_rank() == 0
    start = time.monotonic()
    answers: list[Any] = []
    with group.syncing(lambda: raise_engine_error(answers)):
        is_merged = any(each.layer is not None for each in sent)
        in_place = not (is_merged or is_sharded(trainer))
        sender = new_sender(group, encoding, buckets[share.index :: share.count], in_place)
        if is_root:
            trainer.weight_version = version = next_weight_version(trainer)
            answers += [
                engine.receive_weights.remote(content, limit, encoding, version=version)
                for engine in trainer.vllm_engines
            ]
        failure: SyncError | PeerError | None = None

        def attempt(step: Callable[[], None]) -> None:
            nonlocal failure
            try:
                if failure is None:
                    step()
            except (SyncError, PeerError) as error:
                if not is_sharded(trainer):
                    raise
                failure = error  # this rank gathers with the other ranks to the end

        for linked in linked_buckets(buckets, specs):
            if is_sharded(trainer) and isinstance(group, StreamGroup):
                attempt(sender.finish)  # DeepSpeed's gather waits for all work of the GPU, without a deadline
            with _gathered(trainer, sent, linked):
                own = [(number, bucket) for number, bucket in linked if share.has(number)]
                attempt(partial(_send_linked, sender, share.count, own, sent))
        if failure is not None:
            raise failure
        sender.finish()
        if is_root:
            results = wait_for_engine_results(answers, f"the engines to load {buckets[-1].title}")
            group.answers = dict(zip(engine_indices(trainer), results, strict=True))
        group.encodings.ended(content, time.monotonic() - start, sender.sent)
    return sender.sent


def _send_linked(
    sender: "BucketSender | ChangedSender",
    sources: int,
    linked: Sequence[tuple[int, Bucket]],
    sent: Sequence[EngineParameter],
) -> None:
    """Send ``linked`` buckets, numbered among those of all ``sources``, of parameters in ``sent``."""
    found = values({index: sent[index] for index in _indices(linked)})
    for number, bucket in linked:
        sender.send(number // sources, bucket, [found[span.index] for span in bucket.spans])


def _encoding(group: WeightGroup | None, share: Share, content: Sequence[Any], size: int) -> str:
    """Return the encoding of a sync of ``content``, ``size`` bytes; if several ranks send, that of rank 0."""
    selected = ""
    if group is not None and not share.index:
        selected = group.encodings.select(content, size, least_memory_left(group.answers))
    if share.count == 1:
        return selected
    shared = [selected]
    torch.distributed.broadcast_object_list(shared, src=0)
    return shared[0]


def least_memory_left(answers: Mapping[int, Mapping[str, Any]]) -> int:
    """Return the bytes of host memory that are left here now, or were on an engine's node after its sync.

    ``answers`` are those of the engines in the last sync. The least counts.
    """
    ranks = (rank for answer in answers.values() for rank in answer["ranks"])
    return min([available_memory(), *(int(rank.get("memory_left", 0)) for rank in ranks)])


def _indices(buckets: Sequence[tuple[int, Bucket]]) -> list[int]:
    """Return the indices of the parameters of which numbered ``buckets`` have bytes."""
    return list(dict.fromkeys(span.index for _, bucket in buckets for span in bucket.spans))


@contextmanager
def _gathered(
    trainer: Any, sent: Sequence[EngineParameter], linked: Sequence[tuple[int, Bucket]]
) -> Iterator[None]:
    """Gather the parameters, in ``sent``, of which ``linked`` buckets have bytes."""
    sources = {id(source): source for index in _indices(linked) for source in sent[index].sources}
    with gathered(trainer, list(sources.values())):
        yield


def new_sender(
    group: Any, encoding: str, buckets: Sequence[Bucket], in_place: bool
) -> "BucketSender | ChangedSender":
    """Return the sender of a sync of ``buckets``; see `BucketSender` for ``in_place``."""
    if encoding == CHANGED:
        return ChangedSender(group, buckets, in_place)
    return BucketSender(group, in_place, kept_memory(group, encoding, buckets))


class BucketSender:
    """Sends all bytes of buckets, with up to `SLOTS` of them in flight; ``sent`` counts them.

    With ``in_place``, large tensors are sent from their own memory, if the group can; they must not change
    before `finish`. ``kept``: the bytes are packed there and stay there.
    """

    def __init__(self, group: WeightGroup, in_place: bool, kept: Kept | None = None) -> None:
        in_place = in_place and group.in_place and kept is None
        self._group, self._packer = group, Packer(kept or group.buffers, group.device, in_place)
        self._in_flight: list[Transfer] = []
        self.sent = 0

    def send(self, number: int, bucket: Bucket, tensors: Sequence["torch.Tensor"]) -> None:
        """Start to send ``tensors``, those of bucket ``number``, once a slot is free."""
        if len(self._in_flight) == SLOTS:
            self._in_flight.pop(0).finish()
        parts = self._packer.parts(number, bucket, tensors)
        self.sent += sum(map(len, parts))
        self._in_flight.append(self._group.start(parts, bucket.title))

    def finish(self) -> None:
        """Wait until all buckets are sent."""
        for transfer in self._in_flight:
            transfer.finish()
        self._in_flight.clear()
