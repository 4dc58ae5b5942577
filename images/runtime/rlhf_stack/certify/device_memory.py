"""The rung ``device-memory``: a sync's own packing, receiving and checksums, on the memory of this device."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple
from typing import Any

from rlhf_stack.accelerator import devices
from rlhf_stack.certify.ladder import Found, Place
from rlhf_stack.certify.model import Measurement
from rlhf_stack.lazy import torch
from rlhf_stack.sync.buckets import plan_buckets
from rlhf_stack.sync.digest import checksum
from rlhf_stack.sync.encoding import Encodings
from rlhf_stack.sync.engine_parameters import parameter_spec
from rlhf_stack.sync.group import Buffers, Watch, unwatched
from rlhf_stack.sync.kept import Kept
from rlhf_stack.sync.receiving import receive
from rlhf_stack.sync.sending import BucketSender

HIDDEN, ROWS = 64, 4096  # the embedding is larger than a bucket of the small sizes
SMALL_BUCKET, BUCKET = 300_000, 32_000_000


def parameters(small: bool) -> "dict[str, torch.Tensor]":
    """Random 16-bit parameters on the host, the same in every process: small, strided and large ones."""
    torch.manual_seed(0)
    scale = 1 if small else 16
    shapes = {
        "embed": (ROWS * scale, HIDDEN * scale),
        **{f"{layer}.weight": (HIDDEN * scale, HIDDEN * scale) for layer in range(8)},
        **{f"{layer}.bias": (HIDDEN * scale - 1,) for layer in range(8)},
        "scalar": (),
    }
    made = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}
    return made | {"transposed": torch.randn(HIDDEN, 3 * HIDDEN).to(torch.bfloat16).t()}


class _Loopback:
    """A sync group in which this process receives what it has sent."""

    name, rank, in_place = "loopback", 0, True

    def __init__(self, device: Any) -> None:
        self.device, self.buffers = device, Buffers(device, pinned=False)
        self.answers: dict[int, dict[str, Any]] = {}
        self.kept: Kept | None = None
        self.selection = ""
        self.encodings = Encodings(0, "off")
        self.sent: list[list[torch.Tensor]] = []
        self.receiving = False

    def start(self, parts: Sequence["torch.Tensor"], what: str) -> "_Loopback":  # noqa: ARG002
        """Keep copies of ``parts``, or fill them with those that were kept first."""
        if self.receiving:
            for part, kept in zip(parts, self.sent.pop(0), strict=True):
                part.copy_(kept)
        else:
            self.sent.append([part.clone() for part in parts])
        return self

    def broadcast(self, tensor: "torch.Tensor", src: int, stream: Any) -> None:
        """Do nothing: there is no other rank."""

    def finish(self) -> None:
        """Do nothing: copies are made in order."""

    release = close = raise_failure = finish

    def syncing(self, watch: Watch = unwatched) -> AbstractContextManager[None]:  # noqa: ARG002
        """No other rank is informed."""
        return nullcontext()

    def describe(self, rank: int) -> str:
        """See `WeightGroup`."""
        return f"rank {rank} of this process"


def climb(place: Place) -> Found:
    """Send all parameters in buckets, receive them, compare; then compare checksums with the host's."""
    device = devices.torch_device()
    host = parameters(place.small)
    held = {name: tensor.to(device) for name, tensor in host.items()}
    arrived: dict[str, torch.Tensor] = {}
    group = _Loopback(device)
    specs = [parameter_spec(name, tensor) for name, tensor in held.items()]
    limit = SMALL_BUCKET if place.small else BUCKET
    sender = BucketSender(group, in_place=True)
    tensors = list(held.values())
    for number, bucket in enumerate(plan_buckets(specs, limit)):
        sender.send(number, bucket, [tensors[span.index] for span in bucket.spans])
    sender.finish()
    group.receiving = True

    def load(pairs: "list[tuple[str, torch.Tensor]]") -> None:
        arrived.update((name, tensor.clone()) for name, tensor in pairs)

    receive([group], [astuple(spec) for spec in specs], limit, device, load, torch.bfloat16)
    different = [name for name in host if not torch.equal(arrived[name].cpu(), host[name])]
    for _ in range(2):  # the first one loads the kernels
        start = time.monotonic()
        on_device = {name: checksum(tensor) for name, tensor in arrived.items()}
        seconds = time.monotonic() - start
    wrong = [name for name, tensor in host.items() if checksum(tensor) != on_device[name]]
    largest = arrived["embed"].view(torch.int16)
    largest[-1, -1] ^= 1
    unseen = checksum(arrived["embed"]) == on_device["embed"]
    problems = [
        *([f"other bytes arrived: {', '.join(different)}"] if different else []),
        *([f"the checksum on the device is not the host's: {', '.join(wrong)}"] if wrong else []),
        *(["a changed bit did not change the checksum"] if unseen else []),
    ]
    size = sum(spec.size for spec in specs)
    return Found(
        [
            Measurement("bytes that arrived", size, "bytes"),
            Measurement("checksums", size / seconds / 1e9, "GB/s"),
        ],
        {"device": str(device), "buckets": len(plan_buckets(specs, limit))},
        "; ".join(problems),
    )
