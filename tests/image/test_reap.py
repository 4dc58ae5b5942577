"""reap removes what a killed driver's run leaves, and keeps other processes and segments."""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any

import pytest
from rlhf_stack.cleanup import process_table

END_SECONDS = 60
DRIVER = """
import os, subprocess, sys, time
import ray

for last in (False, False, True):
    try:
        ray.init(num_cpus=1, object_store_memory=100 << 20, include_dashboard=False, _temp_dir=sys.argv[1])
        break
    except Exception as error:  # Ray's own limits for the start of a node, which a busy machine exceeds
        if last or "timed out during startup" not in str(error):
            raise
        ray.shutdown()

@ray.remote(num_cpus=0)
class Engine:
    def start(self):
        # Not a child of the worker, so that no release of Ray ends it with the worker.
        command = "setsid sleep 1000 >/dev/null 2>&1 & echo $!"
        self.child = subprocess.Popen(["sleep", "1000"])
        lost = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, text=True).stdout
        return f"{int(lost)} {self.child.pid}"

engine = Engine.remote()
print(ray.get(engine.start.remote(), timeout=60), flush=True)
time.sleep(1000)
"""


def reap(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Run reap; return its exit code and what it reports as left."""
    command = ["rlhf-stack", "reap", "--json", "--older-than", "0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)["left"]


def until_gone(role: str) -> None:
    """Wait until no process of this role is left; AssertionError after `END_SECONDS`."""
    end = time.monotonic() + END_SECONDS
    while any(one.role == role for one in process_table.snapshot()):
        assert time.monotonic() < end, f"a {role} is still running after {END_SECONDS} s"
        time.sleep(0.1)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def foreign() -> Iterator["subprocess.Popen[bytes]"]:
    """Start a process of the same user that does not belong to Ray."""
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def segment() -> Iterator[shared_memory.SharedMemory]:
    """Create a segment that this process holds open."""
    held = shared_memory.SharedMemory(create=True, size=4096)
    yield held
    held.close()
    held.unlink()


@pytest.mark.timeout(400)
def test_what_a_killed_driver_left_is_removed_and_nothing_else(
    foreign: "subprocess.Popen[bytes]", segment: shared_memory.SharedMemory
) -> None:
    """reap removes an engine's process, and a segment that no process has open."""
    with tempfile.TemporaryDirectory(prefix="r") as folder:  # short: Ray's sockets are below it
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, folder], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert driver.stdout
        engine, child = map(int, driver.stdout.readline().split())
        assert [one["what"].split()[0] for one in reap()[1]] == [str(engine)]
        assert alive(child)
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        until_gone(process_table.RAYLET)
        lost = shared_memory.SharedMemory(create=True, size=4096)
        resource_tracker.unregister(lost._name, "shared_memory")  # type: ignore[attr-defined]
        lost.close()

        code, left = reap()
        assert code == 1
        assert str(engine) in {one["what"].split()[0] for one in left if one["kind"] == "process"}
        assert alive(engine)

        code, removed = reap("--yes")
        assert code == 0
        assert all(one["removed"] for one in removed)
        assert not alive(engine)
    assert alive(foreign.pid)
    assert Path("/dev/shm", segment.name).exists()
    assert not Path("/dev/shm", lost.name).exists()
    assert reap()[1] == []
