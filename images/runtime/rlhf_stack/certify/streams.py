"""The rung ``streams``: what `rlhf_stack.sync.nccl` requires of CUDA streams and NCCL, with one rank."""

import os
import time
from typing import Any

from rlhf_stack.accelerator import devices
from rlhf_stack.certify.ladder import Found, NotClimbedError, Place
from rlhf_stack.certify.model import Measurement
from rlhf_stack.cluster.host import free_port
from rlhf_stack.config import env_vars
from rlhf_stack.lazy import torch
from rlhf_stack.sync.errors import SyncError
from rlhf_stack.sync.membership import Members
from rlhf_stack.sync.nccl import StreamGroup

HOST = "127.0.0.1"
SECONDS = 4.0  # the deadline of a transfer, of which a quarter is for its diagnosis
CYCLES = 1 << 36  # half a minute of a GPU
SLACK = 6.0


class _OneRank(StreamGroup):
    """A group over torch's NCCL, which needs neither vLLM nor OpenRLHF."""

    def __init__(self, members: Members, device: Any) -> None:
        import torch.distributed as dist

        super().__init__(members, device)
        store = dist.PrefixStore("nccl", members.connect_to_store())
        dist.init_process_group("nccl", store=store, rank=0, world_size=1)

    def broadcast(self, tensor: "torch.Tensor", src: int, stream: Any) -> None:  # noqa: ARG002
        import torch.distributed as dist

        dist.broadcast(tensor, src)

    def close(self) -> None:
        """Do nothing: the group would wait for the stream that is late, and the process ends."""


def climb(place: Place) -> Found:
    """Send what the default stream still computes; then let the stream be late, which must end in time."""
    del place
    if not devices.is_gpu():
        raise NotClimbedError("NCCL and CUDA streams need a GPU")
    os.environ[env_vars.SYNC_TIMEOUT] = str(SECONDS)
    group = _OneRank(Members(HOST, free_port(HOST), 0, 1), torch.cuda.current_device())
    held = torch.zeros(1 << 24, dtype=torch.uint8, device=group.device)
    with group.syncing():
        torch.cuda._sleep(1 << 28)  # the buffer is filled a tenth of a second later
        held.fill_(7)
        filled = torch.cuda.Event()
        filled.record()
        group.start([held], "a bucket").finish()
        ordered = filled.query()
    start = time.monotonic()
    try:
        with group.syncing():
            torch.cuda._sleep(CYCLES)
            group.start([held], "a late bucket").finish()
        late = "a broadcast that is late by half a minute was not noticed"
    except SyncError as error:
        late = "" if "a late bucket" in str(error) else f"the error does not name the bucket: {error}"
    seconds = time.monotonic() - start
    if not late and seconds > SECONDS + SLACK:
        late = f"the error came after {seconds:.0f} s, the deadline is {SECONDS:g} s"
    problem = late if ordered else "NCCL sent the buffer before the default stream had filled it"
    return Found([Measurement("seconds until a late broadcast is an error", seconds, "s")], {}, problem)
