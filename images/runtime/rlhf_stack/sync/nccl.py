"""Sync groups over NCCL (RCCL on AMD).

One H100 ran them with one rank alone. With several ranks they only ran on the fake GPU of the unit tests.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

from rlhf_stack.config import env_vars
from rlhf_stack.lazy import torch
from rlhf_stack.sync.background import Background
from rlhf_stack.sync.encoding import Encodings, refuse_gloo_only
from rlhf_stack.sync.errors import SyncError
from rlhf_stack.sync.group import Buffers, Watch, released_after, unwatched
from rlhf_stack.sync.kept import Kept
from rlhf_stack.sync.membership import Members, ended, first_line

POLL_SECONDS = 0.0005
JOINING = "nccl, joining the communicator"
GARBAGE = ", so engines would load garbage as weights"


class NcclTransfer:
    """Broadcasts on their own CUDA stream, which is polled until a deadline, as NCCL has none."""

    def __init__(
        self,
        reached: Callable[[], bool],
        members: Members,
        failure: Callable[[RuntimeError], SyncError],
        abort: Callable[[], None],
    ) -> None:
        self._reached, self._members, self._failure, self._abort = reached, members, failure, abort
        self._end = time.monotonic() + env_vars.sync_timeout() - env_vars.sync_grace()

    def finish(self) -> None:
        """See `Transfer`: after an error the GPU no longer waits for the broadcasts."""
        try:
            self._members.wait_for_transfer(self._done, self._failure)
        except BaseException:
            self._abort()
            raise

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
    """The common part of both groups: a separate stream broadcasts while the current one packs and loads.

    It is created before it has joined the other ranks, so that whoever waits for `join` can `close` it.
    """

    name = "nccl"
    in_place = True
    kept: Kept | None = None
    selection = ""

    def __init__(self, members: Members, device: Any) -> None:
        refuse_gloo_only("this group is NCCL's")
        self.rank, self.describe, self._members = members.rank, members.describe, members
        self.answers: dict[int, dict[str, Any]] = {}
        self.encodings = Encodings(0, "off")  # finding changed elements takes longer than NCCL
        self.device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        self.buffers = Buffers(self.device, pinned=False)
        self._stream = torch.cuda.Stream(self.device)
        self._is_closed = False

    def join(self) -> None:
        """Join the communicator of all ranks; `SyncError` at the deadline, which closes the group."""
        joining = Background(self._join)  # NCCL's communicators are made without a deadline
        end = time.monotonic() + env_vars.sync_timeout() - env_vars.sync_grace()
        try:
            self._members.wait_for_transfer(ended(joining, end), self._late)
        except BaseException:
            self.close()
            raise

    def _join(self) -> None:
        try:
            self._join_communicator()
        except SyncError:
            raise
        except Exception as error:  # of vLLM's or torch's: RuntimeError, OSError, AssertionError
            remedy = "see NCCL's own reason with NCCL_DEBUG=INFO, or use --vllm.sync_backend gloo"
            raise self._members.own_error(JOINING, error, remedy) from error

    def _late(self, error: RuntimeError) -> SyncError:
        return self._members.failure(JOINING, error)

    def _join_communicator(self) -> None:
        raise NotImplementedError

    def start(self, parts: Sequence["torch.Tensor"], what: str) -> NcclTransfer:
        """See `WeightGroup`."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(self._stream):
                for part in parts:
                    if part.numel():
                        self.broadcast(part, src=0, stream=self._stream)
                reached = self._stream.record_event()
        except SyncError:
            raise
        except RuntimeError as error:  # such as of a rank that NCCL has lost; it is published
            raise self._failure(f"{what}: {first_line(error)}", error) from error
        return NcclTransfer(
            reached.query, self._members, lambda error: self._failure(what, error), self.close
        )

    def broadcast(self, tensor: "torch.Tensor", src: int, stream: Any) -> None:
        """See `WeightGroup`."""
        raise NotImplementedError

    def syncing(self, watch: Watch = unwatched) -> AbstractContextManager[None]:
        """See `WeightGroup`."""
        return released_after(self._members.syncing(watch), self.buffers)

    def raise_failure(self) -> None:
        """See `WeightGroup`."""
        self._members.raise_failure()

    def close(self) -> None:
        """See `WeightGroup`."""
        raise NotImplementedError

    def _failure(self, what: str, error: RuntimeError) -> SyncError:
        failure = self._members.failure(f"nccl, {what}", error)
        self.close()
        return failure


class NcclGroup(StreamGroup):
    """Upstream's group, vLLM's PyNcclCommunicator; a disabled one, which does nothing, is an error."""

    def __init__(self, members: Members, device: Any) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

        super().__init__(members, device)
        # Its constructor, which `join` calls, may wait in NCCL for ever: `close` aborts what it has by then.
        self._communicator: Any = PyNcclCommunicator.__new__(PyNcclCommunicator)

    def _join_communicator(self) -> None:
        import torch.distributed as dist
        from vllm.distributed.utils import StatelessProcessGroup

        store = dist.PrefixStore("nccl", self._members.connect_to_store())
        group = StatelessProcessGroup(rank=self.rank, world_size=self._members.world, store=store)
        self._communicator.__init__(group, device=self.device)
        if self._is_closed:
            self._communicator.disabled = False  # or NCCL's communicator would not be destroyed
            self._communicator.destroy()
        elif self._is_useless():
            raise RuntimeError(f"vLLM could not load NCCL or VLLM_DISABLE_PYNCCL is set{GARBAGE}")

    def _is_useless(self) -> bool:
        return self._members.world > 1 and getattr(self._communicator, "disabled", True)

    def broadcast(self, tensor: "torch.Tensor", src: int, stream: Any) -> None:
        """See `WeightGroup`."""
        if self._is_useless():
            raise SyncError(
                f"{self.describe(self.rank)}: NCCL was aborted after a broadcast that failed{GARBAGE}"
            )
        self._communicator.broadcast(tensor, src=src, stream=stream)

    def close(self) -> None:
        """See `WeightGroup`: NCCL's operations on this GPU are aborted, among them those of `join`."""
        self._is_closed = True
        if hasattr(self._communicator, "comm"):
            self._communicator.destroy()
        else:  # NCCL still makes its communicator, with which vLLM's constructor then does nothing
            self._communicator.disabled = True


class TorchNcclGroup(StreamGroup):
    """torch's NCCL group, as in upstream, for vLLM 0.4, whose communicator only vLLM's own ranks can use.

    torch's watchdog ends the process of a broadcast that lasts longer than the group's timeout: that of torch
    is longer than this group's, by the time in which the ranks diagnose what has failed.
    """

    _group: Any = None

    def _join_communicator(self) -> None:
        import torch.distributed as dist
        from openrlhf.utils.distributed_util import init_process_group

        self._group = init_process_group(
            backend="nccl",
            timeout=timedelta(seconds=env_vars.sync_timeout() + 4 * env_vars.sync_grace()),
            store=dist.PrefixStore("nccl", self._members.connect_to_store()),
            world_size=self._members.world,
            rank=self.rank,
            group_name="openrlhf",
        )
        first = torch.zeros(1, dtype=torch.uint8, device=self.device)
        dist.broadcast(first, 0, group=self._group)  # joins: torch makes the communicator at first use
        torch.cuda.synchronize(self.device)
        if self._is_closed:
            self.close()

    def broadcast(self, tensor: "torch.Tensor", src: int, stream: Any) -> None:  # noqa: ARG002
        """See `WeightGroup`."""
        import torch.distributed as dist

        if self._is_closed:  # torch would use its default group instead
            raise SyncError(f"{self.describe(self.rank)}: the weight-sync group is closed after a failure")
        dist.broadcast(tensor, src, group=self._group)

    def close(self) -> None:
        """See `WeightGroup`: torch aborts the communicator."""
        import torch.distributed as dist

        self._is_closed = True
        group, self._group = self._group, None
        if group is not None:
            Background(lambda: dist.destroy_process_group(group)).done(env_vars.sync_grace())
