"""rlhf_stack.cleanup: what a dead run left is found and ended, and nothing else."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlhf_stack.cleanup import process_table, stale_resources, terminate
from rlhf_stack.cleanup.process_table import Process
from rlhf_stack.cleanup.stale_resources import Segment

UID, OTHER = 1000, 1001
SESSION = "/tmp/ray/session_2026-11-21_18-46-39_814375_9"
GONE = "/tmp/ray/session_2026-11-20_10-00-00_000000_7"
MARKED = {"RAY_RAYLET_PID": "10", "HOME": "/home/a"}


def process(pid: int, parent: int, *command: str, uid: int = UID, **changes: object) -> Process:
    values: dict[str, object] = {"state": "S", "started": 100, "variables": MARKED} | changes
    return Process(pid, parent, uid, command=command, **values)  # type: ignore[arg-type]


RAYLET = process(10, 5, "/site/ray/core/src/ray/raylet/raylet", f"--log_dir={SESSION}/logs", variables={})
ALIVE = [
    process(1, 0, "tini", variables={}),
    process(5, 1, "python", "/opt/venv/bin/ray", "start", "--head", "--block", variables={}),
    process(6, 5, "/site/ray/core/src/ray/gcs/gcs_server", f"--log_dir={SESSION}/logs", variables={}),
    RAYLET,
    process(11, 10, "ray::DashboardAgent"),
    process(12, 10, "python", "/site/ray/_private/workers/default_worker.py"),
    process(20, 10, "ray::LLMRayActor"),
    process(21, 20, "VLLM::EngineCore"),
    process(22, 21, "VLLM::Worker"),
    process(23, 1, "python", "-c", "from multiprocessing.resource_tracker import main;main(35)"),  # detached
    process(30, 10, "ray::JobSupervisor"),
    process(
        31, 30, "python", "-m", "openrlhf.cli.train_ppo_ray", variables=MARKED | {process_table.JOB: "{}"}
    ),
    process(40, 1, "python", "somebody_elses.py", variables={}),
]
LEFT = [
    process(50, 1, "VLLM::EngineCore"),
    process(51, 50, "VLLM::Worker"),
    process(52, 10, "python", "child.py"),  # handed to the raylet
    process(53, 1, "ray::Actor"),
    process(54, 1, "ray::DashboardAgent   ", variables={}),  # its title is where its environment was
]
AGED = dict.fromkeys(range(100), 3600.0)


def test_processes_of_a_live_run_are_not_stale() -> None:
    assert stale_resources.orphaned_workers(ALIVE, UID) == []
    assert stale_resources.stale_session_processes(ALIVE, UID, AGED, 60) == []


def test_processes_whose_worker_ended_are_stale() -> None:
    assert stale_resources.orphaned_workers([*ALIVE, *LEFT], UID) == LEFT


def test_without_the_raylet_all_its_workers_are_stale() -> None:
    lost = stale_resources.orphaned_workers([p for p in ALIVE if p is not RAYLET], UID)
    assert [p.pid for p in lost] == [11, 12, 20, 21, 22, 30, 31]


def test_processes_of_others_and_ended_ones_are_not_stale() -> None:
    table = [process(50, 1, "VLLM::Worker", uid=OTHER), process(51, 1, "VLLM::Worker", state="Z")]
    assert stale_resources.orphaned_workers(table, UID) == []


@given(
    st.lists(
        st.builds(process, st.integers(100, 999), st.integers(1, 999), st.just("python"), variables=st.none())
    )
)
def test_a_process_without_rays_mark_is_never_stale(others: list[Process]) -> None:
    assert stale_resources.orphaned_workers([*ALIVE, *others], UID) == []


def test_old_servers_of_a_session_without_a_raylet_are_stale() -> None:
    server = process(60, 1, "/site/ray/core/src/ray/gcs/gcs_server", f"--log_dir={GONE}/logs", variables={})
    table = [*ALIVE, server]
    assert stale_resources.stale_session_processes(table, UID, AGED, 60) == [server]
    assert stale_resources.stale_session_processes(table, UID, AGED | {60: 3.0}, 60) == []
    assert stale_resources.stale_session_processes(table, OTHER, AGED, 60) == []


def test_a_client_server_of_ray_start_is_stale_without_a_raylet() -> None:
    command = "python", "-m", "ray.util.client.server", "--mode=proxy"
    server = process(61, 1, *command, "--runtime-env-agent-address=http://10.0.0.2:1", variables={})
    by_hand = process(62, 1, *command, variables={})
    assert stale_resources.stale_session_processes([*ALIVE, server], UID, AGED, 60) == []
    assert stale_resources.stale_session_processes([server, by_hand], UID, AGED, 60) == [server]


def test_servers_of_a_starting_node_are_not_stale() -> None:
    starting = [
        process(70, 1, "python", "/opt/venv/bin/ray", "start", "--head", variables={}),
        process(71, 70, "/site/ray/core/src/ray/gcs/gcs_server", f"--log_dir={GONE}/logs", variables={}),
    ]
    assert stale_resources.stale_session_processes(starting, UID, AGED, 0) == []


def test_a_segment_is_stale_if_it_is_ours_old_and_unused() -> None:
    ours, held = Segment("/dev/shm/psm_1", 9, UID, 90.0), Segment("/dev/shm/psm_2", 9, UID, 90.0)
    young, foreign = Segment("/dev/shm/psm_3", 9, UID, 3.0), Segment("/dev/shm/psm_4", 9, OTHER, 90.0)
    assert stale_resources.unused_segments([ours, held, young, foreign], {held.path}, UID, 60) == [ours]


def test_only_segments_of_the_stack_are_listed(tmp_path: Path) -> None:
    ours = {"psm_0a1b", "sem.mp-x1", "torch_812_9", "nccl-Ab12", "0a1b-tp:0-[0-1]-cpushm_1"}
    for name in (*ours, "database.db", "pulse-shm-1"):
        (tmp_path / name).touch()
    found = {Path(one.path).name for one in stale_resources.segments(0.0, tmp_path)}
    assert found == ours


def test_a_segment_is_a_file_that_is_still_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dangling link, or a segment that was removed after it was listed, ended `reap`."""
    for name in ("psm_1", "psm_2"):
        (tmp_path / name).touch()
    (tmp_path / "psm_3").symlink_to("missing")
    (tmp_path / "psm_4").symlink_to("psm_1")
    (tmp_path / "psm_5").mkdir()
    os.mkfifo(tmp_path / "psm_6")
    plain = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        if path.name == "psm_2":
            path.unlink()
        return plain(path)

    monkeypatch.setattr(Path, "lstat", lstat)
    assert [Path(one.path).name for one in stale_resources.segments(0.0, tmp_path)] == ["psm_1"]


def test_in_a_container_with_shared_shm_open_segments_are_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "self"
    (own / "ns").mkdir(parents=True)
    (own / "ns" / "pid").symlink_to("pid:[4026532553]")
    for source, known in (("shm", True), ("tmpfs", False)):
        (own / "mountinfo").write_text(f"338 304 0:91 / /dev/shm rw,nosuid - tmpfs {source} rw\n")
        assert (stale_resources.open_segments([], tmp_path) is not None) == known
    (own / "mountinfo").write_text("338 304 0:91 / /dev/shm rw,nosuid - tmpfs shm rw\n")
    monkeypatch.setenv(stale_resources.KUBERNETES, "10.96.0.1")
    assert stale_resources.open_segments([], tmp_path) is None  # a pod's containers share it


def test_on_a_host_processes_of_containers_are_read_too(tmp_path: Path) -> None:
    """One can have a segment open that the host's /dev/shm has (`docker run --ipc=host`)."""
    for pid, container in ((5, "pid:[1]"), (6, "pid:[2]")):
        folder = tmp_path / str(pid)
        (folder / "ns").mkdir(parents=True)
        (folder / "ns" / "pid").symlink_to(container)
        (folder / "stat").write_text(f"{pid} (a) S 1 {'0 ' * 17}77 0\n")
        (folder / "cmdline").write_bytes(b"a\0")
        (folder / "environ").write_bytes(b"")
    (tmp_path / "self").symlink_to(tmp_path / "5")
    assert [one.pid for one in process_table.snapshot(tmp_path)] == [5]
    assert [one.pid for one in process_table.snapshot(tmp_path, everywhere=True)] == [5, 6]


def sleeping(code: str = "") -> "subprocess.Popen[str]":
    """A process that says when it is ready, then sleeps."""
    source = f"import signal, time\n{code}\nprint('ready', flush=True)\ntime.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert child.stdout
    assert child.stdout.readline() == "ready\n"
    return child


def seen(pid: int) -> Process:
    return next(one for one in process_table.snapshot() if one.pid == pid)


@pytest.fixture
def segment() -> Iterator[Path]:
    """A segment in the machine's shared memory."""
    path = stale_resources.SHM / f"psm_{secrets.token_hex(8)}"
    path.write_bytes(b"x" * 4096)
    yield path
    path.unlink(missing_ok=True)


MAPPED = """
import ctypes, os
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
file = os.open({path!r}, os.O_RDWR)
libc.mmap(None, 4096, 3, 1, file, 0)  # readable and writable, shared; Python's own mmap keeps a descriptor
os.close(file)
"""


@pytest.mark.timeout(60)
def test_a_segment_that_is_only_mapped_is_in_use_and_never_removed(
    segment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM and torch close the descriptor of a segment as soon as they have mapped it."""
    monkeypatch.setattr(stale_resources, "_shm_is_own", lambda _: True)
    child = sleeping(MAPPED.format(path=str(segment)))
    snapshot, mine = process_table.snapshot, (os.getpid(), child.pid)  # others may not be readable here
    monkeypatch.setattr(
        process_table,
        "snapshot",
        lambda proc=process_table.PROC, everywhere=False: [
            p for p in snapshot(proc, everywhere) if p.pid in mine
        ],
    )
    one = next(one for one in stale_resources.segments(0.0) if one.path == str(segment))
    links = {str(link.readlink()) for link in Path(f"/proc/{child.pid}/fd").iterdir()}
    assert str(segment) not in links
    assert str(segment) in (stale_resources.open_segments([seen(child.pid)]) or ())
    assert not stale_resources.remove_segment(one)
    assert segment.read_bytes() == b"x" * 4096
    child.kill()
    child.wait()
    assert stale_resources.remove_segment(one)
    assert not segment.exists()
    assert stale_resources.remove_segment(one)


def test_processes_that_proc_hides_make_segments_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With hidepid a process of another user could have a segment mapped."""
    monkeypatch.setattr(os, "getuid", lambda: UID)
    (tmp_path / "self").mkdir()
    mounts = (
        "338 304 0:91 / /dev/shm rw - tmpfs shm rw\n20 1 0:19 / /proc rw - proc proc rw\n"
        "21 20 0:20 / /proc rw - proc proc rw{}\n"  # mounted over the other
    )
    for options, known in (("", True), (",hidepid=invisible", False), (",hidepid=2", False)):
        (tmp_path / "self" / "mountinfo").write_text(mounts.format(options))
        assert (stale_resources.open_segments([], tmp_path) is not None) == known


def test_processes_that_proc_does_not_show_are_omitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With hidepid=1 their folders are listed and cannot be read."""
    (tmp_path / "7").mkdir()
    (tmp_path / "self" / "ns").mkdir(parents=True)
    (tmp_path / "self" / "ns" / "pid").symlink_to("pid:[4026532553]")
    monkeypatch.setattr(process_table, "_read", MagicMock(side_effect=PermissionError))
    assert process_table.snapshot(tmp_path) == []


@pytest.mark.timeout(60)
def test_an_exiting_process_has_no_segment_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only root can read a process that is exiting."""
    child = sleeping()
    one = seen(child.pid)
    (tmp_path / "self").mkdir()
    mount = "338 304 0:91 / /dev/shm rw,nosuid - tmpfs shm rw\n"
    (tmp_path / "self" / "mountinfo").write_text(mount)
    monkeypatch.setattr(Path, "iterdir", MagicMock(side_effect=PermissionError))
    monkeypatch.setattr(stale_resources, "EXIT_SECONDS", 0.1)
    assert stale_resources.open_segments([one], tmp_path) is None
    child.kill()
    monkeypatch.setattr(stale_resources, "EXIT_SECONDS", 30.0)
    assert stale_resources.open_segments([one], tmp_path) == set()
    child.wait()
    assert stale_resources.open_segments([one], tmp_path) == set()


@pytest.mark.timeout(60)
def test_processes_that_ignore_sigterm_are_killed() -> None:
    willing, deaf = sleeping(), sleeping("signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    ended = terminate.terminate_processes([seen(willing.pid), seen(deaf.pid)], seconds=1.0)
    assert ended == sorted([willing.pid, deaf.pid])
    assert (willing.wait(), deaf.wait()) == (-15, -9)


@pytest.mark.timeout(60)
def test_a_reused_pid_is_not_signalled() -> None:
    child = sleeping()
    table = seen(child.pid)
    before = Process(table.pid, table.parent, table.uid, table.state, table.started - 1, table.command)
    assert terminate.terminate_processes([before], seconds=1.0) == []
    assert child.poll() is None
    child.kill()
    child.wait()


def test_a_process_that_ended_before_is_no_error() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert terminate.terminate_processes([process(child.pid, os.getpid(), "true")]) == []
