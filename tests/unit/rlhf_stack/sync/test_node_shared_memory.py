"""The memory that ranks of a node share: who can open it, and rejection of another process's files."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from rlhf_stack.sync import node_shared_memory


@pytest.fixture
def offered() -> Iterator[list[int]]:
    """Create files as a leader does."""
    files = [os.memfd_create(f"test{index}") for index in range(2)]
    yield files
    for file in files:
        os.close(file)


def test_offered_files_open_as_the_same_memory(offered: list[int]) -> None:
    opened = node_shared_memory._open_offered(node_shared_memory._offer(offered))
    os.pwrite(offered[1], b"weights", 0)
    assert [os.fstat(file).st_ino for file in opened] == [os.fstat(file).st_ino for file in offered]
    assert os.pread(opened[1], 7, 0) == b"weights"
    for file in opened:
        os.close(file)


def test_another_process_with_the_same_pid_is_rejected(offered: list[int]) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    offer = json.loads(node_shared_memory._offer(offered)) | {"token": "of a process in another container"}
    assert node_shared_memory._open_offered(json.dumps(offer)) == []
    assert len(list(Path("/proc/self/fd").iterdir())) == before, "opened files are closed"


def test_a_file_of_another_container_need_not_be_text(offered: list[int]) -> None:
    offer = node_shared_memory._offer(offered)
    os.pwrite(offered[-1], bytes([0xFF]) * 32, 0)
    assert node_shared_memory._open_offered(offer) == []


def test_a_missing_process_shares_nothing(offered: list[int]) -> None:
    offer = json.loads(node_shared_memory._offer(offered))
    missing = [path.replace(str(os.getpid()), "4194305") for path in offer["paths"]]
    assert node_shared_memory._open_offered(json.dumps(offer | {"paths": missing})) == []
