"""A GPU, torch's interface to it, and NCCL, for tests of code that needs them.

An operation runs when the host waits for it, and not before. Of several streams, the newest or the oldest
runs first: what no event orders comes out wrong in one of both. A thread is a process (`Gpu.processes`) with
streams and memory of its own. NCCL waits for a rank that has not joined, and hangs or corrupts on request.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rlhf_stack.sync.background import Background

SECONDS = 20.0  # a test that waits longer has found a hang
HERTZ = 1e9
ANY_ORDER = pytest.mark.parametrize("cuda", ["newest"], indirect=True)  # for tests of deadlines and errors
LOCK = threading.RLock()
Operation = Callable[[], Any]  # False: it cannot run yet


@dataclass(frozen=True)
class Device:
    """See torch."""

    type: str
    index: int | None = None


def device(name: Any, index: int | None = None) -> Device:
    """See torch."""
    if isinstance(name, Device):
        return name
    kind, _, number = name.partition(":")
    return Device(kind, int(number) if number else index)


@dataclass
class Shared:
    """Memory that was exported, and how many other processes will open it or have it open."""

    array: Any
    count: int = 1


class Process:
    """A process with the current device ``index``: its streams, and its bytes on the device."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.allocated = self.peak = self.cached = 0
        self.limbo: list[tuple[Shared, int]] = []  # freed here, and open in another process
        self.streams: list[Stream] = []
        self.current = Stream(self)

    @property
    def reserved(self) -> int:
        """The bytes that other processes cannot use."""
        return self.allocated + self.cached + sum(size for _, size in self.limbo)

    def allocate(self, size: int) -> None:
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def free(self, size: int, shared: Shared | None) -> None:
        self.allocated -= size
        if shared is not None and shared.count:
            self.limbo.append((shared, size))
        else:
            self.cached += size


class Event:
    """See torch."""

    reached = False

    def record(self, stream: "Stream | None" = None) -> None:
        (stream or GPU.process.current).add(lambda: setattr(self, "reached", True))

    def query(self) -> bool:
        """See torch; the device runs one operation meanwhile."""
        GPU.advance(GPU.streams)
        return self.reached


class Stream:
    """See torch."""

    def __init__(self, where: Any = None) -> None:
        self.queue: deque[Operation] = deque()
        (where if isinstance(where, Process) else GPU.process).streams.append(self)
        GPU.streams.append(self)

    def add(self, operation: Operation) -> None:
        with LOCK:
            self.queue.append(operation)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_stream(self, other: "Stream") -> None:
        event = other.record_event()
        self.add(lambda: event.reached)


class Block:
    """Memory of tensors; ``opened``: that of another process."""

    def __init__(self, array: Any, owner: Process | None, opened: Shared | None = None) -> None:
        self.array, self.owner, self.opened = array, owner, opened
        self.shared: Shared | None = None

    def __del__(self) -> None:
        if self.opened is not None:
            self.opened.count -= 1
        elif self.owner is not None:
            self.owner.free(self.array.nbytes, self.shared)


class Tensor:
    """What the runtime uses of ``torch.Tensor``."""

    def __init__(self, array: Any, where: Device, block: Block, pinned: bool = False) -> None:
        self.array, self.device, self.block, self.pinned = array, where, block, pinned
        self.dtype, self.shape, self.is_cuda = array.dtype, array.shape, where.type == "cuda"

    def _same(self, array: Any) -> "Tensor":
        return Tensor(array, self.device, self.block, self.pinned)

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, place: Any) -> "Tensor":
        return self._same(self.array[place])

    def view(self, to: Any) -> "Tensor":
        return self._same(self.array.reshape(to) if isinstance(to, tuple) else self.array.view(to))

    def reshape(self, *shape: int) -> "Tensor":
        return self._same(self.array.reshape(*shape))

    def narrow(self, _: int, start: int, length: int) -> "Tensor":
        return self[start : start + length]

    def detach(self) -> "Tensor":
        return self

    def is_contiguous(self) -> bool:
        return bool(self.array.flags.c_contiguous)

    def numel(self) -> int:
        return int(self.array.size)

    def element_size(self) -> int:
        return int(self.array.itemsize)

    def copy_(self, source: "Tensor", non_blocking: bool = False) -> "Tensor":
        origin = source.array
        if not source.is_cuda and not (non_blocking and source.pinned):
            origin = origin.copy()  # the device reads ordinary memory of the host before this returns
        self._run(lambda: np.copyto(self.array, origin), self.is_cuda or source.is_cuda)
        if source.is_cuda and not self.is_cuda and not (non_blocking and self.pinned):
            GPU.synchronize()
        return self

    def fill_(self, value: int) -> "Tensor":
        self._run(lambda: self.array.fill(value), self.is_cuda)
        return self

    def clone(self) -> "Tensor":
        return empty(self.shape, self.dtype, self.device).copy_(self)

    def to(self, where: Any) -> "Tensor":
        target = device(where)
        return self if target == self.device else empty(self.shape, self.dtype, target).copy_(self)

    def equal(self, other: Any) -> bool:
        GPU.synchronize()
        return bool(np.array_equal(self.array, other))

    @staticmethod
    def _run(operation: Operation, on_device: bool) -> None:
        if on_device:
            GPU.process.current.add(operation)
        else:
            operation()


def empty(size: Any, dtype: Any, device: Any = "cpu", pin_memory: bool = False) -> Tensor:
    """See torch; the bytes are those of somebody else."""
    where, array = TORCH["device"](device), np.zeros(size, dtype)
    array.reshape(-1).view(np.uint8).fill(0xA5)
    owner = GPU.process if where.type == "cuda" else None
    if owner is not None:
        owner.allocate(array.nbytes)
    return Tensor(array, where, Block(array, owner), pin_memory)


def tensor(array: Any, where: Any) -> Tensor:
    """A tensor with the content of ``array``, which the current stream has yet to write."""
    host = Tensor(np.ascontiguousarray(array), Device("cpu"), Block(array, None))
    return empty(array.shape, array.dtype, where).copy_(host)


def reduce_tensor(exported: Tensor) -> tuple[Any, tuple[Any, ...]]:
    """A handle of memory on the device, as of ``torch.multiprocessing.reductions``."""
    exported.block.shared = shared = Shared(exported.array)
    GPU.exported.append(shared)
    unused = ("Tensor", exported.shape, (1,), 0, "Storage", "uint8")
    return open_exported, (*unused, exported.device.index, len(GPU.exported) - 1)


def open_exported(*arguments: Any) -> Tensor:
    """``rebuild_cuda_tensor``."""
    index, number = arguments[6:]
    assert index == GPU.process.index, "CUDA error: invalid device ordinal"
    shared = GPU.exported[number]
    return Tensor(shared.array, Device("cuda", index), Block(shared.array, None, shared))


class Store:
    """``torch.distributed.TCPStore`` and ``PrefixStore``."""

    def __init__(self, values: dict[str, bytes], changed: threading.Condition, prefix: str = "") -> None:
        self._values, self._changed, self._prefix = values, changed, prefix

    def under(self, prefix: str) -> "Store":
        return Store(self._values, self._changed, f"{self._prefix}{prefix}/")

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[self._prefix + key] = value.encode()
            self._changed.notify_all()

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._prefix + key in self._values for key in keys)

    def wait(self, keys: Sequence[str], limit: timedelta) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self.check(keys), limit.total_seconds()):
                raise RuntimeError("wait timeout")

    def get(self, key: str) -> bytes:
        self.wait([key], timedelta(seconds=SECONDS))
        return self._values[self._prefix + key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """See torch; with an ``expected`` of "" it sets a key that is absent."""
        with self._changed:
            if self._values.get(self._prefix + key, b"").decode() == expected:
                self.set(key, value)
            return self._values[self._prefix + key]

    def delete_key(self, key: str) -> None:
        self._values.pop(self._prefix + key, None)


class Nccl:
    """The NCCL of all ranks, and what is wrong with it."""

    def __init__(self) -> None:
        self.missing, self.hangs, self.corrupts = "", False, False
        self.hangs_in_constructor = False  # in a communicator's first operation, after all have joined
        self.failing: dict[int, Exception] = {}  # with what a rank's attempt to join ends
        self.absent: set[int] = set()  # ranks that do not join before the test has ended
        self.joined: set[int] = set()
        self.changed, self.ended = threading.Condition(), threading.Event()
        self.wire: dict[int, Any] = {}

    def join(self, rank: int, world: int) -> None:
        if rank in self.failing:
            raise self.failing[rank]
        if rank in self.absent:
            self.ended.wait(SECONDS)
        with self.changed:
            self.joined.add(rank)
            self.changed.notify_all()
            self.changed.wait_for(lambda: len(self.joined) == world or self.ended.is_set(), SECONDS)


class Communicator:
    """vLLM's ``PyNcclCommunicator``, or torch's (``device`` is None); a disabled one ignores every call."""

    def __init__(self, group: Any, device: Device | None) -> None:
        alone = group.world_size == 1 and device is not None
        self.rank, self.disabled = group.rank, alone or bool(GPU.nccl.missing)
        self.available = not self.disabled
        self.device = device
        self.aborts = self._started = 0
        GPU.communicators.append(self)
        if self.disabled:
            return
        GPU.nccl.join(group.rank, group.world_size)
        self.comm = object()
        end = time.monotonic() + SECONDS
        while GPU.nccl.hangs_in_constructor and self.available and not self.disabled:
            assert time.monotonic() < end, "nobody aborts it"
            time.sleep(0.01)

    def broadcast(self, tensor: Tensor, src: int, stream: Stream) -> None:
        if self.disabled:
            return
        assert self.device in (None, tensor.device)
        assert tensor.numel(), "NCCL was given no bytes"
        number, wire = self._started, GPU.nccl.wire
        self._started += 1

        def run() -> bool:
            if self.aborts:
                return True
            if GPU.nccl.hangs or (self.rank != src and number not in wire):
                return False
            if self.rank == src:
                wire[number] = tensor.array.copy()
            else:
                np.copyto(tensor.array, wire[number] + GPU.nccl.corrupts)
            return True

        stream.add(run)

    def destroy(self) -> None:
        if self.available and not self.disabled:
            self.aborts += 1
            self.available, self.disabled = False, True


class Gpu:
    """The devices of a test, and all processes that use them."""

    def __init__(self, order: str = "newest") -> None:
        self.order, self.nccl = order, Nccl()
        self.streams: list[Stream] = []
        self.exported: list[Shared] = []
        self.communicators: list[Communicator] = []
        self.options: dict[str, Any] = {}  # of torch's last group
        self.uuids = [f"0000000{index}-aaaa" for index in range(4)]
        self._local = threading.local()
        self._stores: dict[int, Store] = {}

    @property
    def process(self) -> Process:
        """The process of this thread."""
        if not hasattr(self._local, "process"):
            self._local.process = Process(0)
        found: Process = self._local.process
        return found

    def processes(self, *actions: Callable[[], Any]) -> list[Any]:
        """What each action returns or raises, in a process whose current device has the action's index."""

        def run(index: int, action: Callable[[], Any]) -> Any:
            self._local.process = Process(index)
            try:
                return action()
            except Exception as error:
                return error

        started = [Background(partial(run, index, action)) for index, action in enumerate(actions)]
        return [each.result() if each.done(2 * SECONDS) else "it hangs" for each in started]

    def advance(self, streams: Sequence[Stream]) -> None:
        """Run one operation of ``streams``, if one can run."""
        with LOCK:
            for stream in streams if self.order == "oldest" else reversed(streams):
                if stream.queue and stream.queue[0]() is not False:
                    stream.queue.popleft()
                    return

    def synchronize(self) -> None:
        end = time.monotonic() + SECONDS
        while any(stream.queue for stream in self.process.streams):
            assert time.monotonic() < end, "the device hangs"
            self.advance(self.process.streams)

    def sleep(self, cycles: int) -> None:
        ends: list[float] = []

        def run() -> bool:
            ends.append(time.monotonic() + cycles / HERTZ)
            return time.monotonic() >= ends[0]

        self.process.current.add(run)

    def collect(self) -> None:
        """``torch.cuda.ipc_collect``."""
        own = self.process
        own.cached += sum(size for shared, size in own.limbo if not shared.count)
        own.limbo = [(shared, size) for shared, size in own.limbo if shared.count]

    @contextmanager
    def stream(self, entered: Stream) -> Iterator[None]:
        process, before = self.process, self.process.current
        process.current = entered
        try:
            yield
        finally:
            process.current = before

    def load_nccl(self) -> None:
        """vLLM's ``NCCLLibrary``."""
        if self.nccl.missing:
            raise OSError(self.nccl.missing)

    def store(self, _: str, port: int, *__: Any, master_listen_fd: int | None = None, **___: Any) -> Store:
        if master_listen_fd is not None:
            os.close(master_listen_fd)
        return self._stores.setdefault(port, Store({}, threading.Condition()))

    def torch_group(self, *_: Any, rank: int, world_size: int, **options: Any) -> Communicator:
        self.options = options
        return Communicator(SimpleNamespace(rank=rank, world_size=world_size), None)


GPU = Gpu()
CUDA: dict[str, Any] = {
    "Stream": Stream,
    "Event": Event,
    "stream": GPU.stream,
    "current_stream": lambda _=None: GPU.process.current,
    "current_device": lambda: GPU.process.index,
    "set_device": lambda index: setattr(GPU.process, "index", index),
    "device_count": lambda: len(GPU.uuids),
    "is_available": lambda: bool(GPU.uuids),
    "get_device_properties": lambda index: SimpleNamespace(uuid=GPU.uuids[index]),
    "synchronize": lambda _=None: GPU.synchronize(),
    "empty_cache": lambda: setattr(GPU.process, "cached", 0),
    "ipc_collect": GPU.collect,
    "memory_allocated": lambda: GPU.process.allocated,
    "max_memory_allocated": lambda: GPU.process.peak,
    "reset_peak_memory_stats": lambda: setattr(GPU.process, "peak", GPU.process.allocated),
    "mem_get_info": lambda: (1000 - GPU.process.reserved, 1000),
    "_sleep": GPU.sleep,
}
DISTRIBUTED: dict[str, Any] = {
    "TCPStore": GPU.store,
    "PrefixStore": lambda name, store: store.under(name),
    "init_process_group": GPU.torch_group,
    "broadcast": lambda sent, src, group=None: (group or GPU.communicators[-1]).broadcast(
        sent, src, GPU.process.current
    ),
    "destroy_process_group": lambda group=None: (group or GPU.communicators[-1]).destroy(),
    "is_nccl_available": lambda: not GPU.nccl.missing,
}
TORCH: dict[str, Any] = {
    "version": SimpleNamespace(cuda="13.0", hip=None),
    "device": device,
    "empty": empty,
    "zeros": lambda size, **options: empty(size, **options).fill_(0),
    "zeros_like": lambda like: empty(like.shape, like.dtype, like.device).fill_(0),
    "arange": lambda size, dtype, device: tensor(np.arange(size).astype(dtype), device),
    "equal": lambda one, other: one.equal(other.array),
    "uint8": np.dtype("uint8"),
    "float32": np.dtype("float32"),
}
MODULES: dict[str, dict[str, Any]] = {
    "torch": TORCH,
    "torch.cuda": CUDA,
    "torch.distributed": DISTRIBUTED,
    "torch.multiprocessing": {},
    "torch.multiprocessing.reductions": {"reduce_tensor": reduce_tensor},
    "vllm": {},
    "vllm.distributed": {},
    "vllm.distributed.utils": {"StatelessProcessGroup": SimpleNamespace},
    "vllm.distributed.device_communicators": {},
    "vllm.distributed.device_communicators.pynccl": {"PyNcclCommunicator": Communicator},
    "vllm.distributed.device_communicators.pynccl_wrapper": {"NCCLLibrary": GPU.load_nccl},
    "openrlhf": {},
    "openrlhf.utils": {},
    "openrlhf.utils.distributed_util": {"init_process_group": DISTRIBUTED["init_process_group"]},
}


def install(monkeypatch: pytest.MonkeyPatch, order: str) -> Gpu:
    """Let this process import a torch for CUDA, and vLLM's communicator; see `Gpu` for ``order``."""
    GPU.__init__(order)  # type: ignore[misc]
    for name, content in MODULES.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)
    return GPU
