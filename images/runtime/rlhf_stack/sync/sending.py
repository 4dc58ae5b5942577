"""The trainer's side of a sync: parameters are packed into buckets while the bucket before is on its way."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from rlhf_stack.config import env_vars
from rlhf_stack.sync.buckets import Bucket, Parameter, Place, plan
from rlhf_stack.sync.deadlines import wait
from rlhf_stack.sync.group import SLOTS, Transfer, WeightGroup

if TYPE_CHECKING:
    import torch

ZERO_3 = 3


def send(trainer: Any, parameters: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Bring ``parameters`` (names and tensors) of OpenRLHF's ``ActorPPOTrainer`` to its engines.

    Every trainer rank calls it with the same ones: ZeRO-3 gathers them bucket by bucket. Returns those that
    are left to upstream's own way, one by one: all when GPUs are shared, with Ray's collectives, or with
    DeepSpeed's tensor parallelism; else none. `SyncError` when they do not arrive.
    """
    import deepspeed
    import torch

    if not _takes(trainer):
        return list(parameters)
    is_root = torch.distributed.get_rank() == 0
    gathers = section(trainer.strategy.args, "ds").zero_stage == ZERO_3
    described = [describe(name, parameter) for name, parameter in parameters]
    content = [astuple(parameter) for parameter in described]
    limit = env_vars.sync_bucket()
    with ExitStack() as stack:
        if is_root:
            group = trainer._model_update_group
            stack.enter_context(group.syncing())
            outbox = Outbox(group, in_place=not gathers)
            answers = [engine.receive_weights.remote(content, limit) for engine in trainer.vllm_engines]
        buckets = plan(described, limit)
        for number, bucket in enumerate(buckets):
            members = [parameters[place.index][1] for place in bucket.places]
            with deepspeed.zero.GatheredParameters(members, enabled=gathers):
                if is_root:
                    outbox.put(number, bucket, [member.data for member in members])
        if is_root:
            outbox.finish()
            group.answers = wait(answers, f"the engines to load {buckets[-1].title} over {group.name}")
    return []


class Outbox:
    """Buckets on their way: one that is being sent, and one that is being packed or waits for it.

    ``in_place``: large tensors are sent from where they lie, as nothing changes them before `finish`; only
    if the group can.
    """

    def __init__(self, group: WeightGroup, in_place: bool) -> None:
        self._group = group
        self._in_place = in_place and group.in_place
        self._flying: list[Transfer] = []

    def put(self, number: int, bucket: Bucket, tensors: Sequence["torch.Tensor"]) -> None:
        """Send ``tensors``, those of bucket ``number``, when the one before the last has left."""
        if len(self._flying) == SLOTS:
            self._flying.pop(0).finish()
        sources = dict(zip(bucket.places, tensors, strict=True))
        parts = [self._part(number, bucket, part, sources) for part in bucket.parts()]
        self._flying.append(self._group.start(parts, bucket.title))

    def finish(self) -> None:
        """Until all have left."""
        for transfer in self._flying:
            transfer.finish()
        self._flying.clear()

    def _part(
        self, number: int, bucket: Bucket, places: tuple[Place, ...], sources: dict[Place, "torch.Tensor"]
    ) -> "torch.Tensor":
        if self._in_place and len(places) == 1:
            whole = sources[places[0]]
            if whole.is_contiguous() and whole.device == self._group.device:
                return as_bytes(whole)
        buffer = self._group.buffers.first(bucket.size, number)
        for place in places:
            source = sources[place]
            view = buffer[place.begin : place.end].view(source.dtype)
            view.view(source.shape).copy_(source, non_blocking=self._group.device.type != "cpu")
        return buffer[places[0].begin : places[-1].end]


def describe(name: str, parameter: Any) -> Parameter:
    """What an engine has to know of a parameter; of ZeRO-3's its whole shape."""
    shape = getattr(parameter, "ds_shape", parameter.shape)
    dtype = str(parameter.dtype).removeprefix("torch.")
    return Parameter(name, dtype, tuple(shape), shape.numel() * parameter.element_size())


def section(arguments: Any, name: str) -> Any:
    """A section of OpenRLHF's arguments; older releases have all of them in one."""
    return getattr(arguments, name, arguments)


def as_bytes(tensor: "torch.Tensor") -> "torch.Tensor":
    """The memory of a contiguous tensor, one-dimensional uint8."""
    import torch

    return tensor.detach().reshape(-1).view(torch.uint8)


def _takes(trainer: Any) -> bool:
    arguments = trainer.strategy.args
    return not (
        getattr(trainer, "use_cuda_ipc", False)
        or getattr(section(arguments, "vllm"), "sync_with_ray", False)
        or getattr(section(arguments, "ds"), "tensor_parallel_size", 1) > 1
    )
