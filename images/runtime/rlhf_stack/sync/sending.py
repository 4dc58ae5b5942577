"""The trainer's side of a sync: a bucket is packed while the previous one is in flight."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from rlhf_stack.config import env_vars
from rlhf_stack.sync.actor_waits import wait_for_engine_results
from rlhf_stack.sync.buckets import Bucket, ParameterSpec, Span, linked_buckets, plan_buckets
from rlhf_stack.sync.engine_parameters import engine_parameters
from rlhf_stack.sync.errors import SyncError
from rlhf_stack.sync.group import SLOTS, Transfer, WeightGroup

if TYPE_CHECKING:
    import torch

ZERO_3 = 3


def send(trainer: Any, parameters: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Send ``parameters`` (names and tensors) of OpenRLHF's ``ActorPPOTrainer`` to its engines, in buckets.

    Adapters of LoRA are merged into the weights that are sent.

    Every trainer rank calls it with the same parameters: ZeRO-3 gathers them bucket by bucket. Returns the
    parameters that upstream must send one by one: all if GPUs are shared, with Ray's collectives, or with
    DeepSpeed's tensor parallelism; else none. `SyncError` if they do not arrive.
    """
    import deepspeed
    import torch

    if not supports_buckets(trainer):
        return list(parameters)
    sent = engine_parameters(trainer, parameters)
    is_merged = any(each.layer is not None for each in sent)
    is_root = torch.distributed.get_rank() == 0
    gathers = section(trainer.strategy.args, "ds").zero_stage == ZERO_3
    specs = [parameter_spec(each.name, each.parameter) for each in sent]
    content = [astuple(spec) for spec in specs]
    limit = env_vars.sync_bucket()
    with ExitStack() as stack:
        if is_root:
            group = trainer._model_update_group
            stack.enter_context(group.syncing())
            sender = BucketSender(group, in_place=not (gathers or is_merged))
            answers = [engine.receive_weights.remote(content, limit) for engine in trainer.vllm_engines]
        buckets = plan_buckets(specs, limit)
        failure: SyncError | None = None
        for linked in linked_buckets(buckets):
            indices = dict.fromkeys(span.index for _, bucket in linked for span in bucket.spans)
            sources = [source for index in indices for source in sent[index].sources]
            with deepspeed.zero.GatheredParameters(sources, enabled=gathers):
                if is_root and failure is None:
                    values = {index: sent[index].value() for index in indices}
                    try:
                        for number, bucket in linked:
                            sender.send(number, bucket, [values[span.index] for span in bucket.spans])
                    except SyncError as error:
                        if not gathers:
                            raise
                        failure = error  # rank 0 gathers with the other ranks to the end
        if failure is not None:
            raise failure
        if is_root:
            sender.finish()
            what = f"the engines to load {buckets[-1].title} over {group.name}"
            group.answers = wait_for_engine_results(answers, what)
    return []


class BucketSender:
    """Sends buckets with up to `SLOTS` of them in flight.

    With ``in_place``, large tensors are sent from their own memory, if the group can; they must not change
    before `finish`.
    """

    def __init__(self, group: WeightGroup, in_place: bool) -> None:
        self._group = group
        self._in_place = in_place and group.in_place
        self._in_flight: list[Transfer] = []

    def send(self, number: int, bucket: Bucket, tensors: Sequence["torch.Tensor"]) -> None:
        """Start to send ``tensors``, those of bucket ``number``, once a slot is free."""
        if len(self._in_flight) == SLOTS:
            self._in_flight.pop(0).finish()
        sources = dict(zip(bucket.spans, tensors, strict=True))
        parts = [self._part(number, bucket, spans, sources) for spans in bucket.parts()]
        self._in_flight.append(self._group.start(parts, bucket.title))

    def finish(self) -> None:
        """Wait until all buckets are sent."""
        for transfer in self._in_flight:
            transfer.finish()
        self._in_flight.clear()

    def _part(
        self, number: int, bucket: Bucket, spans: tuple[Span, ...], sources: dict[Span, "torch.Tensor"]
    ) -> "torch.Tensor":
        if self._in_place and len(spans) == 1:
            whole = sources[spans[0]]
            if whole.is_contiguous() and whole.device == self._group.device:
                start = spans[0].start
                return as_bytes(whole)[start : start + spans[0].size]
        buffer = self._group.buffers.for_bucket(bucket.size, number)
        for span in spans:
            source = sources[span]
            view = buffer[span.begin : span.end].view(source.dtype)
            if len(view) < source.numel():
                source = source.reshape(-1).narrow(0, span.start // source.element_size(), len(view))
            view.view(source.shape).copy_(source, non_blocking=self._group.device.type != "cpu")
        return buffer[spans[0].begin : spans[-1].end]


def parameter_spec(name: str, parameter: Any) -> ParameterSpec:
    """Describe a parameter for an engine; the shape of a ZeRO-3 parameter is that of the gathered one."""
    shape = getattr(parameter, "ds_shape", parameter.shape)
    dtype = str(parameter.dtype).removeprefix("torch.")
    return ParameterSpec(name, dtype, tuple(shape), shape.numel() * parameter.element_size())


def supports_buckets(trainer: Any) -> bool:
    """Report whether ``ActorPPOTrainer`` sends its weights in buckets, by its arguments."""
    arguments = trainer.strategy.args
    return not (
        getattr(trainer, "use_cuda_ipc", False)
        or getattr(section(arguments, "vllm"), "sync_with_ray", False)
        or getattr(section(arguments, "ds"), "tensor_parallel_size", 1) > 1
    )


def section(arguments: Any, name: str) -> Any:
    """Return a section of OpenRLHF's arguments; older releases have one flat namespace, which is returned."""
    return getattr(arguments, name, arguments)


def as_bytes(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return the memory of a contiguous tensor as one-dimensional uint8."""
    import torch

    return tensor.detach().reshape(-1).view(torch.uint8)
