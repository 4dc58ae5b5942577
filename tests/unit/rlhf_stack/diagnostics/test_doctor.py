"""rlhf_stack.diagnostics.doctor: the checks, the comparison of nodes, and the facts of this machine."""

import dataclasses
import json
import os
import re
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlhf_stack.accelerator import rocm
from rlhf_stack.cleanup.process_table import Process
from rlhf_stack.cli.main import main
from rlhf_stack.config import env_vars, image
from rlhf_stack.diagnostics import host_check
from rlhf_stack.diagnostics.doctor import checks, collect, comparison, libraries
from rlhf_stack.diagnostics.doctor.facts import (
    Disk,
    GpuHealth,
    GpuProcess,
    GpuReport,
    Library,
    NodeAnswer,
    NodeFacts,
    Patch,
    RayProcess,
    is_relevant,
    relevant_variables,
)
from rlhf_stack.known_bad.finding import Finding, worst

from scripts.matrix.load import find, load
from scripts.matrix.model import STAND_IN
from tests.unit.rlhf_stack.diagnostics.facts import GIB, GPU_NODE

HEALTHY = dataclasses.replace(
    GPU_NODE,
    accelerator="cpu",
    versions={"ray": "2.55.0", "python": "3.11.2"},
    patches=(Patch("vllm", "a-patch", "present", ""),),
    resources={"GPU": 2.0, "object_store_memory": 1e9},
    gpus=0,
    driver="",
    built_for="",
    taken_ports=(6379, 8265),
    disks=(Disk("/tmp", 100 * GIB, 50 * GIB),),
    attention="xformers 0.0.26.post1",
)
CUDA: dict[str, Any] = {
    "accelerator": "cuda",
    "gpus": 8,
    "driver": "580.95.05",
    "built_for": "cuda 13.0",
    "gpu_report": GpuReport((GpuHealth(0, "0000:3b:00.0", "NVIDIA H100"),), unavailable=""),
}
AMD = CUDA | {"accelerator": "rocm"}
REPEATED = {"ROCR_VISIBLE_DEVICES": "0,0,1", "HIP_VISIBLE_DEVICES": "0,1"}
ONE, TWO = Library("trainer", "/a", "2.20.5+cuda12.4", "aa"), Library("engine", "/b", "2.18.1+cuda12.1", "bb")

NEWER = Library("engine", "/b", "2.27.3+cuda13.0", "bb")  # which does not start with NCCL_CUMEM_ENABLE=0


def node(**changes: Any) -> NodeFacts:
    return dataclasses.replace(HEALTHY, **changes)


def bad(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.id, finding.severity) for finding in findings if finding.severity != "ok"]


def test_a_healthy_node_passes_every_check() -> None:
    found = checks.check_node(HEALTHY)
    assert bad(found) == []
    assert len(found) >= len(checks.CHECKS) - 2  # neither driver nor NCCL was found


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"versions": {"deepspeed": "0.17.6"}},
            [("deepspeed-zero2-accumulation", "warning"), ("deepspeed-zero3-gloo", "warning")],
        ),
        ({"patches": (Patch("vllm", "a", "altered", "vllm/x.py"),)}, [("patches", "error")]),
        ({"patches": ()}, [("patches", "note")]),
        (CUDA | {"resources": {"GPU": 8.0}}, []),
        (CUDA | {"gpus": 0}, [("gpus", "error")]),
        (CUDA | {"variables": {"CUDA_VISIBLE_DEVICES": "0"}}, [("gpus", "error")]),
        (CUDA | {"variables": {"CUDA_VISIBLE_DEVICES": "0,1,2"}}, [("gpus", "note")]),
        (CUDA | {"variables": {"CUDA_VISIBLE_DEVICES": ""}}, [("gpus", "error")]),
        (AMD | {"variables": {"HIP_VISIBLE_DEVICES": "0, 1"}}, [("gpus", "error")]),
        (AMD | {"variables": REPEATED}, [("gpus", "error")]),
        (CUDA | {"resources": {"GPU": 8.0}, "driver": "570.86.10"}, [("driver", "error")]),
        (CUDA | {"resources": {"GPU": 8.0}, "attention": ""}, [("attention", "note")]),
        ({"missing_library": "/no/libnccl.so.2"}, [("nccl", "error")]),
        ({"missing_library": "/no/librccl.so", "expected_missing": True}, [("nccl", "note")]),
        ({"libraries": (ONE, TWO)}, [("nccl", "warning")]),
        ({"libraries": (ONE, TWO), "variables": {"NCCL_CUMEM_ENABLE": "0"}}, [("nccl", "note")]),
        ({"libraries": (ONE, NEWER), "variables": {"NCCL_CUMEM_ENABLE": "0"}}, [("nccl", "warning")]),
        ({"libraries": (ONE, dataclasses.replace(ONE, user="engine"))}, []),
        ({"libraries": (ONE, dataclasses.replace(ONE, user="engine", build_id="cc"))}, [("nccl", "warning")]),
        ({"shm_total": 64 << 20, "resources": {}}, [("ports", "warning"), ("shm", "warning")]),
        ({"resources": {"object_store_memory": 4e9}}, [("shm", "error")]),
        ({"open_files": 1024}, [("ulimit", "warning")]),
        ({"open_files": 20000}, [("ulimit", "note")]),
        ({"open_files": -1}, []),
        ({"variables": {"GLOO_SOCKET_IFNAME": "eth9"}}, [("interfaces", "error")]),
        ({"variables": {"GLOO_SOCKET_IFNAME": "eth"}}, [("interfaces", "error")]),
        ({"variables": {"NCCL_SOCKET_IFNAME": "eth"}}, []),
        ({"variables": {"NCCL_SOCKET_IFNAME": "=eth"}}, [("interfaces", "error")]),
        ({"variables": {"NCCL_SOCKET_IFNAME": "^docker,lo"}}, []),
        ({"resolves_to": "127.0.1.1"}, [("interfaces", "note")]),
        ({"resolves_to": "127.0.1.1", "variables": {"GLOO_SOCKET_IFNAME": "eth0"}}, []),
        ({"disks": (Disk("/tmp", 100 * GIB, GIB),)}, [("disk", "error")]),
        ({"disks": (Disk("/tmp", 100 * GIB, 8 * GIB),)}, [("disk", "warning")]),
        (CUDA | {"resources": {"GPU": 8.0}, "driver": "580.65.06"}, []),
        (CUDA | {"resources": {"GPU": 8.0}, "driver": "580.65.05"}, [("driver", "error")]),
        ({"stale_locks": ("/x/lock",)}, [("build-lock", "error")]),
        ({"stale_processes": ("7 ray::Actor",)}, [("left-process", "warning")]),
        ({"gpu_processes": (GpuProcess(7, 900, "python", False),)}, [("gpu-memory", "warning")]),
        ({"gpu_processes": (GpuProcess(7, 900, "python", True),)}, []),
    ],
)  # fmt: skip
def test_a_problem_is_found_and_nothing_else(
    changes: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    found = checks.check_node(node(**changes))
    assert sorted(bad(found)) == sorted(expected)
    assert all(finding.remedy for finding in found if finding.severity in ("warning", "error"))


@given(
    st.builds(
        node,
        gpus=st.integers(0, 16),
        accelerator=st.sampled_from(["cpu", "cuda", "rocm", None]),
        resources=st.dictionaries(st.sampled_from(["GPU", "object_store_memory"]), st.floats(0, 1e12)),
        variables=st.dictionaries(
            st.sampled_from(["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME"]),
            st.text(max_size=9),
        ),
        shm_total=st.integers(0, 1 << 40),
        open_files=st.integers(-1, 1 << 30),
    )
)
def test_any_node_can_be_judged(facts: NodeFacts) -> None:
    assert worst(checks.check_node(facts)) in ("ok", "note", "warning", "error")


OTHERS = {"python": "3.11.2"}
DIFFER = ("versions-differ", "error")


def answer(address: str, clock_offset: float = 0.0, **changes: Any) -> NodeAnswer:
    return NodeAnswer(address, node(**changes), clock_offset, 0.2)


def raylet(**variables: str) -> tuple[RayProcess, ...]:
    return (RayProcess("raylet", 1, "raylet", variables),)


def test_a_task_of_ray_reports_the_gpus_that_its_node_sees() -> None:
    """Ray hides them from a task that requests none."""
    task = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "NCCL_DEBUG": "INFO"}
    own = Process(os.getpid(), 7, 0, "S", 0, ("ray::_facts",), task)
    for visible in ({}, {"CUDA_VISIBLE_DEVICES": "0,1"}):
        node_process = Process(7, 1, 0, "S", 0, ("/ray/raylet/raylet",), visible)
        assert collect.node_variables([node_process, own], task) == visible | {"NCCL_DEBUG": "INFO"}
    assert collect.node_variables([own], task) == {"NCCL_DEBUG": "INFO"}
    shell = dataclasses.replace(own, command=("python",), variables={})
    assert collect.node_variables([shell], task) == task


def test_processes_without_the_variables_of_a_job_are_not_compared() -> None:
    """Doctor's own task, workers that wait for a job, and the actor of Ray that starts a job's driver."""
    lines = ("ray::PPOTrainer.fit", "ray::IDLE", "ray::JobSupervisor.run", "ray::_facts")
    pids = (11, 12, 13, os.getpid())
    table = [Process(pid, 7, 0, "S", 0, (line,), {}) for pid, line in zip(pids, lines, strict=True)]
    assert [one.name for one in collect._ray_processes(table)] == ["ray::PPOTrainer.fit"]


def test_equal_nodes_have_no_findings() -> None:
    same = [answer("a", ray_processes=raylet(A="1")), answer("b", ray_processes=raylet(A="1"))]
    assert bad(comparison.compare_nodes(same)) == []


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (NodeAnswer("b", None), ("node", "error")),
        (answer("b", clock_offset=-3.0, ray_processes=raylet(A="1")), ("clock", "warning")),
        (answer("b", versions={"ray": "2.12.0"} | OTHERS, ray_processes=raylet(A="1")), DIFFER),
        (answer("b", ray_processes=raylet(A="2")), ("env-nodes", "warning")),
        (answer("b", ray_processes=raylet()), ("env-nodes", "warning")),
    ],
    ids=["no answer", "clock", "versions", "another value", "not set"],
)  # fmt: skip
def test_a_node_that_differs_is_named(other: NodeAnswer, expected: tuple[str, str]) -> None:
    found = comparison.compare_nodes([answer("a", ray_processes=raylet(A="1")), other])
    assert bad(found) == [expected]


def test_a_clock_offset_within_the_error_is_not_reported() -> None:
    assert bad(comparison.compare_nodes([NodeAnswer("a", node(), 1.1, 0.2)])) == []


def test_an_interface_may_be_named_differently_on_each_node() -> None:
    found = [answer(name, ray_processes=raylet(GLOO_SOCKET_IFNAME=name)) for name in ("eth0", "ens3")]
    assert bad(comparison.compare_nodes(found)) == []


def test_the_device_plugin_of_kubernetes_gives_each_node_its_own_gpus() -> None:
    found = [answer(name, ray_processes=raylet(NVIDIA_VISIBLE_DEVICES=f"GPU-{name}")) for name in "ab"]
    assert bad(comparison.compare_nodes(found)) == []


def test_different_processes_of_a_node_are_grouped_by_value() -> None:
    one = RayProcess("driver", 7, "python", {"NCCL_CUMEM_ENABLE": "0"})
    other = RayProcess("worker", 9, "ray::A", {"CUDA_VISIBLE_DEVICES": "1"})
    found = list(comparison.compare_processes(node(ray_processes=(*raylet(), one, other))))
    assert bad(found) == [("env-processes", "warning")]
    assert found[0].evidence == "not set: raylet 1, worker 9; 0: driver 7"


def test_a_job_that_sets_a_variable_for_all_that_it_starts_is_a_note() -> None:
    started = [RayProcess(role, 7, role, {"NCCL_DEBUG": "INFO"}) for role in ("driver", "worker")]
    assert bad(list(comparison.compare_processes(node(ray_processes=(*raylet(), *started))))) == [
        ("env-processes", "note")
    ]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("NCCL_DEBUG", True),
        ("RLHF_STACK_EVENTS", True),
        ("RLHF_STACK_TOLD", False),
        ("HF_TOKEN", False),
        ("VLLM_API_KEY", False),
        ("HOME", False),
    ],
)
def test_no_secret_is_a_relevant_variable(name: str, shown: bool) -> None:
    assert is_relevant(name) == shown
    assert (name in relevant_variables({name: "x"})) == shown


def test_gpu_processes_are_parsed_from_nvidia_smi() -> None:
    listing = "812, 40536, python\n9, [N/A], ray::Engine, odd\n\nNo devices were found\n"
    assert collect.gpu_processes_in(listing, {812}) == (
        GpuProcess(812, 40536, "python", True),
        GpuProcess(9, 0, "ray::Engine, odd", False),
    )


def elf(build_id: bytes, text: bytes) -> bytes:
    """A file with one segment of notes, of which one is a build id."""
    note = struct.pack("<III4s", 4, len(build_id), 3, b"GNU\0") + build_id
    header = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 1)
    segment = struct.pack("<IIQQQQQQ", 4, 4, 120, 0, 0, len(note), len(note), 4)
    return header.ljust(64, b"\0") + segment + note + text


def test_version_and_build_id_are_read_from_a_library(tmp_path: Path) -> None:
    file = tmp_path / "libnccl.so.2"
    file.write_bytes(elf(bytes(range(20)), b"\0NCCL version 2.20.5+cuda12.4\0"))
    assert libraries.version(file) == "2.20.5+cuda12.4"
    assert libraries.build_id(file) == bytes(range(20)).hex()
    file.write_bytes(b"no ELF")
    assert libraries.version(file) == libraries.build_id(file) == ""


def test_the_build_id_of_a_system_library_is_read() -> None:
    """This process has mapped the C library, whose build id distributions keep for their debuggers."""
    mapped = {
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libc.so" in line
    }
    (found,) = (Path(name) for name in mapped)
    assert re.fullmatch("[0-9a-f]{40}", libraries.build_id(found))


@given(st.binary(max_size=300))
def test_any_bytes_can_be_parsed_for_a_build_id(content: bytes) -> None:
    found = libraries.note_of(content)
    assert found == "" or bytes.fromhex(found) in content


def test_the_facts_of_this_machine_can_be_collected() -> None:
    found = collect.collect_facts()
    assert found.versions["python"]
    assert "lo" in found.interfaces
    assert found.disks


RCCL = "/opt/venv/lib/python3.11/site-packages/torch/lib/librccl.so"


@pytest.mark.parametrize(
    ("suffix", "value", "severity"),
    [
        (STAND_IN, RCCL, "note"),
        (STAND_IN, "/a/librccl.so", "error"),
        (STAND_IN, sys.executable, None),
        ("", RCCL, "error"),
    ],
)
def test_only_a_stand_in_may_lack_the_library_of_its_own_default(
    suffix: str, value: str, severity: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = find(load(), f"ray2.55.0-vllm0.29.0-rocm7{suffix}")
    (tmp_path / image.CELL).write_bytes(msgspec.json.encode(cell))
    monkeypatch.setattr(image, "stand_in_defaults", partial(image.stand_in_defaults, tmp_path))
    monkeypatch.setenv("VLLM_NCCL_SO_PATH", value)
    found = [one for one in checks.libraries(collect.collect_facts()) if "VLLM_NCCL_SO_PATH" in one.what]
    assert [one.severity for one in found] == ([severity] if severity else [])


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--json", *arguments])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, report


def test_a_freeze_is_judged_by_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "freeze.txt"
    file.write_text("ray==2.44.0\nvllm==0.8.2\n")
    code, report = ask(capsys, "--freeze", str(file))
    assert (code, report["worst"], report["schema"]) == (3, "error", "rlhf-stack/doctor/1")
    assert report["findings"][0]["id"] == "vllm-ray-2.44"
    assert report["findings"][0]["sources"] == ["vllm-project/vllm#16622"]
    file.write_text("requests==2.32.0\nnothing\n")
    code, report = ask(capsys, "--freeze", str(file))
    assert (code, report["lines_read"]) == (0, 1)
    main(["doctor", "--freeze", str(file)])
    assert "1 line with a version was read" in capsys.readouterr().out


def test_a_log_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, freeze = tmp_path / "log", tmp_path / "freeze"
    log.write_text("RuntimeError: Device string must not be empty\n")
    code, report = ask(capsys, "--log", str(log))
    assert (code, report["findings"][0]["id"], report["findings"][0]["line"]) == (3, "vllm-no-nvml", 1)
    assert main(["doctor", "--log", str(log)]) == 3
    printed = " ".join(capsys.readouterr().out.split())
    assert "NVIDIA_VISIBLE_DEVICES=all" in printed
    assert "seen: line 1: RuntimeError: Device string must not be empty" in printed
    log.write_text("'aimv2' is already used by a Transformers config")
    freeze.write_text("vllm==0.11.0\n")
    code, report = ask(capsys, "--log", str(log), "--freeze", str(freeze))
    assert (code, report["lines_read"], report["lines_skipped"]) == (0, 1, [])


@pytest.mark.parametrize("other", [[], ["--log"]], ids=["alone", "with a log"])
def test_a_list_without_versions_is_refused_with_the_formats(
    other: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, freeze = tmp_path / "log", tmp_path / "freeze"
    log.write_text("all is well\n")
    freeze.write_text("Versions: torch 2.6.0 vllm 0.19.1\n")
    options = ["--freeze", str(freeze), *other, *([str(log)] if other else [])]
    assert main(["doctor", *options]) == 2
    assert "`pip list`, `pip show`, `conda list`" in capsys.readouterr().err


SKIPPED = ["torch==foo", "ray==bogus", "verl @ git+https://..."]


@pytest.mark.parametrize("other", [[], ["--log"]], ids=["alone", "with a log"])
def test_lines_without_a_valid_version_are_named(
    other: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, freeze = tmp_path / "log", tmp_path / "freeze"
    log.write_text("all is well\n")
    freeze.write_text(
        "torch==foo\nvllm==0.19.1\nray==bogus\nverl @ git+https://u:secret@host/verl.git@ab12\n"
    )
    options = ["--freeze", str(freeze), *other, *([str(log)] if other else [])]
    assert main(["doctor", *options]) == 1, "a warning: they were not judged"
    printed = capsys.readouterr().out
    assert "packages without a valid version" in printed
    assert "seen:   torch==foo, ray==bogus, verl @ git+https://..." in printed
    assert printed.endswith("1 line with a version was read\n")
    code, report = ask(capsys, *options)
    assert (code, report["worst"], report["lines_skipped"]) == (1, "warning", SKIPPED)
    assert report["findings"][-1]["id"] == "versions-skipped"


def test_skipped_lines_of_packages_that_no_entry_judges_are_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every package of an environment of conda has an address instead of a version."""
    freeze = tmp_path / "freeze"
    freeze.write_text(
        "numpy-quaternion @ file:///croot/q/work\nvllm==0.19.1\n-e git+https://host/x#egg=mylib\n"
    )
    code, report = ask(capsys, "--freeze", str(freeze))
    assert (code, report["findings"][-1]["severity"]) == (0, "note")
    assert len(report["lines_skipped"]) == 2


def test_a_line_without_a_valid_version_explains_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, freeze = tmp_path / "log", tmp_path / "freeze"
    log.write_text("odd.StrangeError: x\n")
    freeze.write_text("torch==foo\nvllm==0.19.1\nray==\x1b]0;x\x07\n")
    assert main(["doctor", "--log", str(log), "--freeze", str(freeze)]) == 4
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--log", "--freeze"])
def test_a_closed_standard_input_is_wrong_usage(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)  # as Python sets it for `<&-`
    assert main(["doctor", option, "-"]) == 2
    assert capsys.readouterr().err == "error: standard input is closed\n"


OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory\n"
STEPS = "step\n" * 2000
UNEXPLAINED = re.compile(
    r"no entry names (?:.*\n)*(?:first failure|last error): .*(?:\n  )?line \d+: book.OddError: strange\n"
)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("all is well\n", 0),
        ("Worker exit type: INTENDED_USER_EXIT Worker exit detail: exit_actor() is called.\n", 0),
        ("Worker exit type: SYSTEM_ERROR\nJob 'x' succeeded\n", 0),
        ("free(): invalid pointer\nWorker exit type: SYSTEM_ERROR\n", 1),
        ("NCCL INFO Using network Socket\n", 0),
        ("NCCL WARN NET/IB : Unable to open device mlx5_0\nNCCL INFO Using network Socket\n", 1),
        ("torch.OutOfMemoryError: CUDA out of memory\n", 3),
        ("Worker exit type: SYSTEM_ERROR\nbook.OddError: strange\n", 4),
        ("first\nbook.OddError: strange\n", 4),
        ("NCCL WARN NET/IB : Unable to open device mlx5_0\nbook.OddError: strange\n", 4),
        ("torch.OutOfMemoryError: CUDA out of memory\nbook.OddError: strange\n", 3),
        ("1\n2\nNCCL WARN NET/IB : Unable to open device mlx5_0\n", 1),
        (OUT_OF_MEMORY + STEPS + "book.OddError: strange\n", 4),
        (OUT_OF_MEMORY + STEPS + "Worker exit type: SYSTEM_ERROR\n", 3),
        ("ConnectionError: Connection refused\n(A pid=7) book.OddError: strange\n", 4),
        ("WARNING: Error: Connection refused, retrying in 5 s\nJob 'x' succeeded\n", 0),
        ("signals: SIGKILL: 0\n", 0),
    ],
    ids=[
        *("nothing", "an actor that exited", "a note", "a crash before its consequence"),
        *("TCP, which is right without RDMA adapters", "a warning", "an error", "only a note explains"),
        *("an unexplained error", "an error after a warning", "an error after its cause"),
        *("a warning about the last error", "an error long after another"),
        *("a known consequence long after its cause", "an error after the consequence of something"),
        *("what was tried again", "a counter"),
    ],
)
def test_the_exit_code_says_what_was_found_in_a_log(
    text: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    log.write_text(text)
    assert main(["doctor", "--log", str(log)]) == code
    printed = capsys.readouterr().out
    assert bool(UNEXPLAINED.search(printed)) == (code == 4)
    assert ("first failure: A pid=7\n" in printed) == ("(A pid=7)" in text)


@pytest.mark.parametrize(
    "line",
    [
        "bash: line 1: nvcc: command not found",
        "thread 'main' panicked at src/main.rs:2:5:",
        "Job entrypoint command failed with exit code 1",
        "Worker exit type: SYSTEM_ERROR",
        "NCCL INFO NET/OFI Using Socket\nJob 'raysubmit_1' failed",
    ],
)
def test_an_error_without_an_entry_for_its_cause_is_quoted(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    log.write_text(f"starting\n{line}\n")
    assert main(["doctor", "--log", str(log)]) == 4
    printed = capsys.readouterr().out
    assert "no entry names the cause of the last error" in printed
    assert f": {line.splitlines()[-1]}\n" in printed.partition("last error: ")[2]


MANY_ERRORS = """Root Cause (first observed failure):
[0]:
  time      : 2026-05-21_15:43:03
  host      : node-b
  rank      : 3 (local_rank: 1)
  exitcode  : 1 (pid: 14750)
(A pid=7) 2026-05-21 10:00:00,000 ERROR Traceback (most recent call last):
(A pid=7)   File "/job/reward.py", line 3, in score
(A pid=7) odd.FirstError: x
(A pid=7) During handling of the above exception, another exception occurred:
(A pid=7) book.OddError: strange
"""


@pytest.mark.parametrize(
    ("after", "printed"),
    [
        (
            "(B pid=8) 2026-05-21 10:00:09,000 odd.OtherError\n",
            [
                "first failure: A pid=7, at 2026-05-21 10:00:00,000",
                "likely consequences: 1 ",
                "(by time stamps)",
            ],
        ),
        ("(B pid=8) odd.OtherError\n", ["likely consequences: 1 ", "order of lines"]),
        (
            "(B pid=8) 2026-05-21 10:00:00,100 odd.FirstError: x\n",
            ["1 other processes have the same", "unclear"],
        ),
        ("(B pid=8) EOFError: Broken pipe\n", ["likely consequences: 1 ", "none has an error of its own"]),
    ],
    ids=["by time", "by lines", "at the same moment", "of a lost peer"],
)
def test_the_first_failure_of_an_unexplained_log_is_described(
    after: str, printed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    log.write_text(MANY_ERRORS + after)
    code, report = ask(capsys, "--log", str(log))
    assert report["first_error"]["text"] == "odd.FirstError: x"
    main(["doctor", "--log", str(log)])
    out = capsys.readouterr().out
    always = [
        "raised in /job/reward.py:3",
        "which led to book.OddError: strange",
        "torchrun observed first: rank 3",
    ]
    assert code == 4
    assert [text for text in printed + always if text not in out] == []


def test_the_first_failure_of_an_explained_log_is_described_if_it_adds_a_frame(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    log.write_text(MANY_ERRORS.replace("odd.FirstError: x", OUT_OF_MEMORY.strip()))
    assert main(["doctor", "--log", str(log)]) == 3
    assert "first failure: A pid=7" in capsys.readouterr().out


ESCAPES = "\x1b]0;owned\x07\x1b[2J\x1b[31mRuntimeError: Device string must not be empty\x1b[0m\r\x9b1m\n"


@pytest.mark.parametrize(
    "log",
    [
        ESCAPES,
        "(A pid=7) odd.Strange\x1b[2JError: \x1b]8;;http://x\x07here\x1b[3A\n",
        MANY_ERRORS.replace("odd.FirstError: x", "odd.FirstError: \x1b[2Jx\x08").replace("strange", "\x1bc"),
    ],
    ids=["explained", "unexplained", "many"],
)
def test_no_control_character_of_a_log_reaches_the_terminal(
    log: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A log could clear the screen, or set the title of the terminal."""
    file = tmp_path / "log"
    file.write_text(log)
    assert main(["doctor", "--log", str(file)]) in (3, 4)
    printed = capsys.readouterr().out
    assert "Error: " in printed
    assert printed.replace("\n", "").isprintable()


def test_a_log_of_consequences_names_no_first_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    log.write_text("(A pid=7) book.OddError: communicator was aborted\n")
    assert main(["doctor", "--log", str(log)]) == 4
    assert "it has no first cause, only what follows from one, first from A pid=7" in capsys.readouterr().out


def test_this_node_is_checked_without_heavy_imports() -> None:
    code = (
        "import sys\nfrom rlhf_stack.cli.main import main\nmain(['doctor', '--local', '--all'])\n"
        "print([name for name in ('torch', 'ray', 'vllm', 'transformers') if name in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(collect.__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert "was built without patches" in done.stdout


def gpus(*names: str) -> GpuReport:
    return GpuReport(tuple(GpuHealth(index, "", name) for index, name in enumerate(names)), unavailable="")


@pytest.mark.parametrize(
    ("first", "second", "reported"),
    [
        (gpus("H100", "H100"), gpus("H100"), False),
        (gpus("H100"), gpus("L40S"), True),
        (gpus("H100", "L40S"), gpus("H100", "L40S"), True),
        (gpus("H100"), gpus(), False),
    ],
)
def test_gpus_of_several_types_are_reported(first: GpuReport, second: GpuReport, reported: bool) -> None:
    answers = [answer("a", gpu_report=first), answer("b", gpu_report=second)]
    found = [finding for finding in comparison.compare_nodes(answers) if finding.id == "gpu-types"]
    assert bool(found) == reported
    if found and ", " not in found[0].evidence:
        assert found[0].evidence == "H100: a; L40S: b"


def test_models_of_gpus_are_known_without_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    smi = GpuReport((GpuHealth(0, "0000:3b:00.0", "NVIDIA H100"),), unavailable="")
    sources = {
        "nvidia.models": ("NVIDIA H200",),
        "rocm.product_names": ("AMD Instinct MI300X",),
        "amd_gpus": (host_check.Gpu("rocm", "AMD GPU", "gfx942"),),
    }
    for name, found in sources.items():
        monkeypatch.setattr(f"{collect.__name__}.{name}", lambda found=found: found)
    assert collect.gpu_models(smi) == ("NVIDIA H100",)
    for name, expected in (
        ("nvidia.models", "AMD Instinct MI300X"),
        ("rocm.product_names", "AMD GPU gfx942"),
    ):
        assert collect.gpu_models(GpuReport()) != (expected,)
        monkeypatch.setattr(f"{collect.__name__}.{name}", tuple)
        assert collect.gpu_models(GpuReport()) == (expected,)


@pytest.mark.parametrize(("accelerator", "driver"), [("rocm", "6.12.12"), ("cuda", "580.95.05")])
def test_the_driver_is_that_of_the_images_gpus(
    monkeypatch: pytest.MonkeyPatch, accelerator: str, driver: str
) -> None:
    monkeypatch.setenv(env_vars.ACCELERATOR, accelerator)
    monkeypatch.setattr(rocm, "driver", lambda: "6.12.12")
    monkeypatch.setattr(collect, "nvidia_driver", lambda: "580.95.05")
    assert collect.collect_facts().driver == driver
