"""A sync group of a trainer rank and the engine worker on its GPU: the worker reads what the trainer packs.

On a CPU both map the same memory; on a GPU the worker opens a handle of the trainer's (CUDA IPC). A Unix
socket carries these, and signals that a bucket is packed or read; it closes when the other process ends.
"""

import mmap
import os
import pickle
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from rlhf_stack.accelerator import devices
from rlhf_stack.config import env_vars
from rlhf_stack.lazy import torch
from rlhf_stack.sync.encoding import Encodings, refuse_gloo_only
from rlhf_stack.sync.errors import SyncError
from rlhf_stack.sync.group import Buffers, Watch, unwatched
from rlhf_stack.sync.kept import Kept

MESSAGE_BYTES = 1 << 16
POLL_SECONDS = 0.5
MEMORY, PACKED, READ, FAILED = "memory", "packed", "read", "failed"
SLOT_BYTES = 4096  # the smallest slot
REMEDY = (
    "with --train.colocate_all the engines must use exactly the GPUs of the actor: --vllm.num_engines times "
    "--vllm.tensor_parallel_size GPUs"
)
CONTAINERS = "a trainer rank and the engine on its GPU must run in one container, of one network"

Message = tuple[str, Any]


class Link:
    """A connection of two processes of one node, which carries messages and the files that they own."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self._connection, self._peer, self._seconds = connection, peer, env_vars.sync_timeout()
        self.watch: Watch = unwatched
        connection.settimeout(self._seconds)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.getuid():
            raise SyncError(f"weight sync: {peer} is a process of another user")

    def send(self, kind: str, content: Any = None, files: Sequence[int] = ()) -> None:
        """Send a message with open ``files``."""
        with self._explained("to take"):
            socket.send_fds(self._connection, [pickle.dumps((kind, content))], files)

    def send_failure(self, error: BaseException) -> None:
        """Report ``error`` to the other process, cut to what a message holds."""
        text = f"{type(error).__name__}: {error}".encode(errors="backslashreplace")[: MESSAGE_BYTES // 2]
        self.send(FAILED, text.decode(errors="ignore"))

    def receive(self, waited_for: str) -> tuple[Message, list[int]]:
        """Return the next message and its files; `SyncError` for a failure that the other process reports."""
        with self._explained(waited_for):
            _wait_until_readable(self._connection, self._seconds, self.watch)
            data, files, _, _ = socket.recv_fds(self._connection, MESSAGE_BYTES, 1)
            if not data:
                raise ConnectionResetError("it has ended")
        kind, content = pickle.loads(data)  # noqa: S301  (a process of the same run and user)
        if kind == FAILED:
            raise SyncError(f"weight sync: {self._peer} failed: {content}")
        return (kind, content), files

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    @contextmanager
    def _explained(self, waited_for: str) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise SyncError(
                f"weight sync: waited {self._seconds:g} s for {self._peer} {waited_for} "
                f"({env_vars.SYNC_TIMEOUT})"
            ) from error
        except OSError as error:
            raise SyncError(f"weight sync: {self._peer} does not answer: {error}") from error


def _wait_until_readable(of: socket.socket, seconds: float, watch: Watch) -> None:
    """Wait for a message or a connection; TimeoutError after ``seconds``. ``watch`` is called meanwhile."""
    end, arrival = time.monotonic() + seconds, select.poll()
    arrival.register(of, select.POLLIN)
    while not arrival.poll(1000 * min(POLL_SECONDS, seconds)):
        watch()
        if time.monotonic() > end:
            raise TimeoutError


def mismatch(trainers: Sequence[tuple[str, str]], workers: Sequence[tuple[str, str]]) -> str:
    """Return why engine workers cannot each join a trainer rank on their GPU, "" if they can.

    ``trainers`` and ``workers`` are GPU and name of each. A trainer rank may have no worker.
    """
    for given in (trainers, workers):
        for gpu, _ in given:
            names = [name for other, name in given if other == gpu]
            if len(names) > 1:
                return f"weight sync: {' and '.join(names)} have the same GPU, {gpu}; {REMEDY}"
    for gpu, name in workers:
        if gpu not in dict(trainers):
            others = ", ".join(f"{name} on GPU {gpu}" for gpu, name in trainers)
            return f"weight sync: no trainer rank is on GPU {gpu} of {name}, but {others}; {REMEDY}"
    return ""


class Offer:
    """A trainer rank's socket for the worker on its GPU; `address` is what the worker connects to.

    ``who`` names the rank and its node in errors.
    """

    def __init__(self, gpu: str, who: str) -> None:
        self.gpu, self._who = gpu, who
        self.address = f"\0rlhf_stack-{secrets.token_hex(16)}"  # of no file system
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.address)
        self._listener.listen(1)

    def withdraw(self) -> None:
        """Close the socket: there is no worker."""
        self._listener.close()

    def accept(self, watch: Watch = unwatched) -> "SameGpuGroup":
        """Wait for the worker; return the trainer's group. ``watch`` is called meanwhile, and may raise."""
        seconds = env_vars.sync_timeout()
        try:
            _wait_until_readable(self._listener, seconds, watch)
            connection, _ = self._listener.accept()
        except TimeoutError as error:
            raise SyncError(
                f"weight sync: {self._who}: no engine worker on GPU {self.gpu} joined within "
                f"{seconds:g} s ({env_vars.SYNC_TIMEOUT}): see the log of the engine on this GPU; "
                f"{CONTAINERS}"
            ) from error
        finally:
            self._listener.close()
        return SameGpuGroup(Link(connection, f"the engine worker on GPU {self.gpu}"), 0, self.gpu)


def join(offers: dict[str, str], gpu: str, who: str) -> "SameGpuGroup":
    """Return the group of a worker, ``who``; ``offers`` are the addresses of the trainer's ranks, by GPU."""
    if why := mismatch([(each, "one") for each in offers], [(gpu, who)]):
        raise SyncError(why)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(offers[gpu])
    except OSError as error:
        raise SyncError(
            f"weight sync: {who}: the trainer rank on GPU {gpu} is not reachable: {error}; {CONTAINERS}"
        ) from error
    return SameGpuGroup(Link(connection, f"the trainer rank on GPU {gpu}"), 1, gpu)


@dataclass
class SameGpuTransfer:
    """A bucket that is packed by the trainer and read by the worker."""

    finish: Callable[[], None]
    release: Callable[[], None]


@dataclass
class SameGpuGroup:
    """See `WeightGroup`; the trainer has rank 0 and the worker rank 1, in each of a run's groups."""

    link: Link
    rank: int
    gpu: str
    name: str = "ipc"
    in_place: bool = False
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    kept: Kept | None = None
    selection = ""

    def __post_init__(self) -> None:
        refuse_gloo_only("the trainer shares its GPUs with the engines")
        self.encodings = Encodings(0, "off")
        self.device = devices.torch_device()
        self.buffers: Buffers = SentMemory(self.link) if self.rank == 0 else OpenedMemory(self)
        self._packed = self._read = self._started = 0

    def broadcast(self, tensor: "torch.Tensor", src: int, stream: Any) -> None:
        """See `WeightGroup`: upstream's call for a parameter, which no release makes over this group."""
        raise NotImplementedError

    def start(self, parts: Sequence["torch.Tensor"], what: str) -> SameGpuTransfer:  # noqa: ARG002
        """See `WeightGroup`: ``parts`` are in `buffers`."""
        self._started += 1
        number = self._started
        if self.rank:
            return SameGpuTransfer(lambda: self._await_packed(number, what), self._release)
        devices.synchronize()
        self.link.send(PACKED)
        return SameGpuTransfer(lambda: self._await_read(number, what), lambda: None)

    @contextmanager
    def syncing(self, watch: Watch = unwatched) -> Iterator[None]:
        """See `WeightGroup`: a failure is reported to the other process."""
        self.link.watch = watch
        self._packed = self._read = self._started = 0
        try:
            yield
        except BaseException as error:
            with suppress(SyncError):
                self.link.send_failure(error)
            raise
        finally:
            self.link.watch = unwatched
        self.buffers.release()

    def raise_failure(self) -> None:
        """See `WeightGroup`: a failure is a message, which ends the wait for another one."""

    def describe(self, rank: int) -> str:
        """See `WeightGroup`."""
        return f"{'engine worker' if rank else 'trainer rank'} on GPU {self.gpu}"

    def close(self) -> None:
        """See `WeightGroup`."""
        self.link.close()
        self.buffers.close()

    def handle(self, waited_for: str) -> None:
        """Receive a message and apply it: memory of a slot, or a signal."""
        (kind, content), files = self.link.receive(waited_for)
        if kind == MEMORY:
            self.buffers.open(*content, files)  # type: ignore[attr-defined]
        elif kind == PACKED:
            self._packed += 1
        else:
            self._read += 1

    def _await_packed(self, number: int, what: str) -> None:
        while self._packed < number:
            self.handle(f"to pack {what}")

    def _await_read(self, number: int, what: str) -> None:
        while self._read < number:
            self.handle(f"to load {what}")

    def _release(self) -> None:
        devices.synchronize()
        self.link.send(READ)


class SentMemory(Buffers):
    """The trainer's slots, each offered to the worker when it is allocated; all have the size of a bucket.

    On a GPU the worker closes them after it has read the last bucket: see `devices.empty_cache`.
    """

    def __init__(self, link: Link) -> None:
        super().__init__(devices.torch_device(), pinned=False)
        self._link = link

    def _new(self, size: int, index: int) -> "torch.Tensor":
        size = max(size, env_vars.sync_bucket(), SLOT_BYTES)
        if devices.is_gpu():
            from torch.multiprocessing.reductions import reduce_tensor

            tensor = torch.empty(size, dtype=torch.uint8, **self._options)
            self._link.send(MEMORY, (index, size, reduce_tensor(tensor)))
            return tensor
        file = os.memfd_create("rlhf_stack_sync")
        try:
            os.posix_fallocate(file, 0, size)
            self._link.send(MEMORY, (index, size, None), [file])
            return mapped(file, size)
        finally:
            os.close(file)


class OpenedMemory(Buffers):
    """The worker's views of the trainer's slots."""

    def __init__(self, group: SameGpuGroup) -> None:
        super().__init__(group.device, pinned=False)
        self._group = group

    def open(self, index: int, size: int, handle: Any, files: list[int]) -> None:
        """Map slot ``index``, as the trainer offers it."""
        if files:
            try:
                self._tensors[index] = mapped(files[0], size)
            finally:
                os.close(files[0])
        else:
            self._tensors[index] = devices.open_handle(handle, self._group.device.index)

    def _new(self, size: int, index: int) -> "torch.Tensor":
        while index not in self._tensors or self._tensors[index].numel() < size:
            self._group.handle(f"to offer memory for {size} bytes")
        return self._tensors[index]


def mapped(file: int, size: int) -> "torch.Tensor":
    """Return the memory of an open file; it is freed when neither process has it mapped."""
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
