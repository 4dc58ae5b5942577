"""The memory that ranks of a node share: who can open it, and who is told apart from a stranger."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from rlhf_stack.sync import node_shared_memory


@pytest.fixture
def offered() -> Iterator[list[int]]:
    """Files as a head makes them."""
    files = [os.memfd_create(f"test{index}") for index in range(2)]
    yield files
    for file in files:
        os.close(file)


def test_what_is_offered_can_be_opened_and_is_the_same_memory(offered: list[int]) -> None:
    opened = node_shared_memory._open_offered(node_shared_memory._offer(offered))
    os.pwrite(offered[1], b"weights", 0)
    assert [os.fstat(file).st_ino for file in opened] == [os.fstat(file).st_ino for file in offered]
    assert os.pread(opened[1], 7, 0) == b"weights"
    for file in opened:
        os.close(file)


def test_another_process_that_has_the_number_is_not_taken_for_it(offered: list[int]) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    offer = json.loads(node_shared_memory._offer(offered)) | {"token": "of a process in another container"}
    assert node_shared_memory._open_offered(json.dumps(offer)) == []
    assert len(list(Path("/proc/self/fd").iterdir())) == before, "what was opened is closed again"


def test_a_process_that_is_not_there_shares_nothing(offered: list[int]) -> None:
    offer = json.loads(node_shared_memory._offer(offered))
    gone = [path.replace(str(os.getpid()), "4194305") for path in offer["paths"]]
    assert node_shared_memory._open_offered(json.dumps(offer | {"paths": gone})) == []
