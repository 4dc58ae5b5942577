"""Sync groups over NCCL (RCCL on AMD). No GPU was available: the unit tests run them on a fake one."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

from rlhf_stack.config import env_vars
from rlhf_stack.lazy import torch
from rlhf_stack.sync.background import Background
from rlhf_stack.sync.encoding import Encodings, Reach, refuse_changed
from rlhf_stack.sync.errors import SyncError
from rlhf_stack.sync.group import Buffers, released_after
from rlhf_stack.sync.kept import Kept
from rlhf_stack.sync.membership import Members

POLL_SECONDS = 0.0005


class NcclTransfer:
    """Broadcasts on their own CUDA stream, which is polled until a deadline, as NCCL has none."""

    def __init__(
        self, reached: Callable[[], bool], members: Members, failure: Callable[[RuntimeError], SyncError]
    ) -> None:
        self._reached, self._members, self._failure = reached, members, failure
        self._end = time.monotonic() + env_vars.sync_timeout() - env_vars.sync_grace()

    def finish(self) -> None:
        """See `Transfer`."""
        try:
            self._members.wait_for_transfer(self._done)
        except RuntimeError as error:
            raise self._failure(error) from error

    def release(self) -> None:
        """Do nothing: no rank reads another rank's buffers."""

    def _done(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not self._reached():
            if time.monotonic() > self._end:
                raise RuntimeError("the GPU's stream has not finished the broadcast")
            if time.monotonic() > until:
                return False
            time.sleep(POLL_SECONDS)
        return True


class StreamGroup:
    """The common part of both groups: a separate stream broadcasts while the current one packs and loads."""

    name = "nccl"
    in_place = True
    kept: Kept | None = None

    def __init__(self, members: Members, device: Any) -> None:
        refuse_changed("this group is NCCL's")
        self.rank, self.describe, self._members = members.rank, members.describe, members
        self.answers: dict[int, dict[str, Any]] = {}
        self.encodings = Encodings(Reach(0, 0), "off")  # finding changed elements takes longer than NCCL
        self.device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        self.buffers = Buffers(self.device, pinned=False)
        self._stream = torch.cuda.Stream(self.device)

    def start(self, parts: Sequence["torch.Tensor"], what: str) -> NcclTransfer:
        """See `WeightGroup`."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for part in parts:
                if part.numel():
                    self.broadcast(part, src=0, stream=self._stream)
            reached = self._stream.record_event()
        return NcclTransfer(reached.query, self._members, lambda error: self._failure(what, error))

    def broadcast(self, tensor: "torch.Tensor", src: int, stream: Any) -> None:
        """See `WeightGroup`."""
        raise NotImplementedError

    def syncing(self) -> AbstractContextManager[None]:
        """See `WeightGroup`."""
        return released_after(self._members.syncing(), self.buffers)

    def close(self) -> None:
        """See `WeightGroup`."""
        raise NotImplementedError

    def _failure(self, what: str, error: RuntimeError) -> SyncError:
        return self._members.failure(f"nccl, {what}", error)


class NcclGroup(StreamGroup):
    """Upstream's group, vLLM's PyNcclCommunicator; a disabled one, which does nothing, is an error."""

    def __init__(self, members: Members, device: Any) -> None:
        import torch.distributed as dist
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        super().__init__(members, device)
        store = dist.PrefixStore("nccl", members.connect_to_store())
        group = StatelessProcessGroup(rank=members.rank, world_size=members.world, store=store)
        joining = Background(lambda: PyNcclCommunicator(group, device=device))
        if not joining.done(env_vars.sync_timeout() - env_vars.sync_grace()):
            raise members.failure("nccl, joining the communicator", TimeoutError("ncclCommInitRank waits"))
        self._communicator = joining.result()
        self._refuse_disabled("vLLM could not load NCCL or VLLM_DISABLE_PYNCCL is set")

    def _refuse_disabled(self, why: str) -> None:
        if self._communicator.disabled and self._members.world > 1:
            raise SyncError(
                f"{self.describe(self.rank)}: {why}, so engines would load garbage as weights; fix it, or "
                "use --vllm.sync_backend gloo"
            )

    def broadcast(self, tensor: "torch.Tensor", src: int, stream: Any) -> None:
        """See `WeightGroup`."""
        self._refuse_disabled("NCCL was aborted after a broadcast that failed")
        self._communicator.broadcast(tensor, src=src, stream=stream)

    def close(self) -> None:
        """See `WeightGroup`: NCCL's operations on this GPU are aborted."""
        self._communicator.destroy()

    def _failure(self, what: str, error: RuntimeError) -> SyncError:
        failure = super()._failure(what, error)
        self.close()
        return failure


class TorchNcclGroup(StreamGroup):
    """torch's NCCL group, as in upstream, for vLLM 0.4, whose communicator only vLLM's own ranks can use.

    A broadcast that does not finish within the deadline ends the process: torch's watchdog aborts it.
    """

    def __init__(self, members: Members, device: Any) -> None:
        import torch.distributed as dist
        from openrlhf.utils.distributed_util import init_process_group

        super().__init__(members, device)
        self._group = init_process_group(
            backend="nccl",
            timeout=timedelta(seconds=env_vars.sync_timeout()),
            store=dist.PrefixStore("nccl", members.connect_to_store()),
            world_size=members.world,
            rank=members.rank,
            group_name="openrlhf",
        )

    def broadcast(self, tensor: "torch.Tensor", src: int, stream: Any) -> None:  # noqa: ARG002
        """See `WeightGroup`."""
        import torch.distributed as dist

        dist.broadcast(tensor, src, group=self._group)

    def close(self) -> None:
        """See `WeightGroup`: torch aborts the communicator."""
        import torch.distributed as dist

        dist.destroy_process_group(self._group)
