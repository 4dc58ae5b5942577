"""rlhf_stack.diagnostics.doctor.gpu_health, with outputs in the form of nvidia-smi's and dmesg's."""

import dataclasses
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlhf_stack.accelerator import nvidia
from rlhf_stack.diagnostics.doctor import collect, gpu_health
from rlhf_stack.diagnostics.doctor.facts import GpuHealth, GpuReport
from rlhf_stack.known_bad.finding import Finding

from tests.unit.rlhf_stack.diagnostics.facts import GPU_NODE

GPU = """
  <gpu id="00000000:{bus}:00.0">
    <product_name>NVIDIA H100 80GB HBM3</product_name>
    <gpu_recovery_action>{recovery}</gpu_recovery_action>
    <fabric><state>{fabric}</state><status>Success</status></fabric>
    <clocks_event_reasons>
      <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
      <clocks_event_reason_sw_power_cap>Active</clocks_event_reason_sw_power_cap>
      <clocks_event_reason_hw_slowdown>{slow}</clocks_event_reason_hw_slowdown>
      <clocks_event_reason_hw_thermal_slowdown>{slow}</clocks_event_reason_hw_thermal_slowdown>
    </clocks_event_reasons>
    <ecc_errors>
      <volatile>
        <sram_correctable>7</sram_correctable>
        <sram_uncorrectable_parity>0</sram_uncorrectable_parity>
        <sram_uncorrectable_secded>{sram}</sram_uncorrectable_secded>
        <dram_uncorrectable>{dram}</dram_uncorrectable>
      </volatile>
      <aggregate><dram_uncorrectable>9</dram_uncorrectable></aggregate>
    </ecc_errors>
    <remapped_rows>
      <remapped_row_pending>{pending}</remapped_row_pending>
      <remapped_row_failure>{failure}</remapped_row_failure>
    </remapped_rows>
  </gpu>"""
WELL = {
    "bus": "3B",
    "recovery": "None",
    "fabric": "Completed",
    "slow": "Not Active",
    "sram": "0",
    "dram": "0",
    "pending": "No",
    "failure": "No",
}
OLD = """<nvidia_smi_log><gpu id="00000000:00:1E.0"><product_name>Tesla T4</product_name>
<clocks_throttle_reasons><clocks_throttle_reason_sw_thermal_slowdown>Active</clocks_throttle_reason_sw_thermal_slowdown>
</clocks_throttle_reasons><ecc_errors><volatile><dram_uncorrectable>N/A</dram_uncorrectable></volatile></ecc_errors>
<retired_pages><pending_retirement>Yes</pending_retirement></retired_pages></gpu></nvidia_smi_log>"""
LINKS = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2)
\t Link 0: 26.562 GB/s
\t Link 1: <inactive>
"""
KERNEL = """[    1.0] Linux version 6.8.0
[ 9.1] NVRM: Xid (PCI:0000:3b:00): 79, pid=3120, name=python, GPU has fallen off the bus.
[ 9.2] NVRM: Xid (PCI:0000:3b:00): 79, pid=3121, name=python, GPU has fallen off the bus.
[ 9.3] NVRM: Xid (PCI:0000:5e:00): 31, pid=77, name=python, MMU Fault
"""
ONE = GpuHealth(0, "00000000:3B:00.0", "NVIDIA H100 80GB HBM3", 0, fabric="Completed")


def log(*gpus: dict[str, str]) -> str:
    return f"<nvidia_smi_log>{''.join(GPU.format(**WELL | gpu) for gpu in gpus)}</nvidia_smi_log>"


def bad(report: GpuReport, **node: Any) -> list[tuple[str, str]]:
    facts = dataclasses.replace(GPU_NODE, gpu_report=report, **node)
    found: list[Finding] = list(gpu_health.check_gpu_health(facts))
    assert found
    assert all(one.remedy for one in found if one.severity in ("warning", "error"))
    return [(one.id, one.severity) for one in found if one.severity != "ok"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"dram": "1"}, [("gpu-ecc", "error")]),
        ({"sram": "2"}, [("gpu-ecc", "error")]),
        ({"failure": "Yes"}, [("gpu-ecc", "error")]),
        ({"pending": "Yes"}, [("gpu-remap", "warning")]),
        ({"recovery": "Drain and Reset"}, [("gpu-recovery", "error")]),
        ({"slow": "Active"}, [("gpu-throttled", "warning")]),
        ({"fabric": "In Progress"}, [("gpu-fabric", "error")]),
        ({"fabric": "N/A"}, []),
    ],
)
def test_a_fault_of_a_gpu_is_found_and_nothing_else(
    changes: dict[str, str], expected: list[tuple[str, str]]
) -> None:
    health = gpu_health.health_in(log({}, changes | {"bus": "5E"}))
    assert health[0] == ONE
    assert [gpu.bus for gpu in health] == ["00000000:3B:00.0", "00000000:5E:00.0"]
    assert bad(GpuReport(health, unavailable="")) == expected


def test_the_output_of_an_old_driver_is_read() -> None:
    (gpu,) = gpu_health.health_in(OLD)
    assert (gpu.uncorrected, gpu.remap_pending, gpu.slowdowns) == (None, True, ("sw_thermal_slowdown",))
    assert bad(GpuReport((gpu,), unavailable="")) == [("gpu-remap", "warning"), ("gpu-throttled", "warning")]


def test_a_gpu_with_fewer_nvlinks_than_others_of_its_model_is_named() -> None:
    assert gpu_health.active_links(LINKS) == (2, 1)
    two = (ONE, dataclasses.replace(ONE, index=1))
    assert bad(GpuReport(two, "", (2, 1))) == [("gpu-nvlink", "warning")]
    assert bad(GpuReport(two, "", (2, 2))) == []
    assert bad(GpuReport((ONE, dataclasses.replace(ONE, index=1, name="another")), "", (2, 1))) == []


def test_faults_in_the_kernels_log_are_counted_and_those_of_programs_are_not() -> None:
    assert gpu_health.xids_in(KERNEL) == ("79 at 0000:3b:00 (2 times)",)
    assert bad(GpuReport((ONE,), "", xids=("79 at 0000:3b:00",))) == [("gpu-xid", "warning")]
    assert bad(GpuReport((ONE,), "", xids_unavailable="dmesg: not permitted")) == [("gpu-xid", "note")]


def test_what_is_unavailable_is_said() -> None:
    assert bad(GpuReport()) == [("gpu-health", "note")]
    assert bad(GpuReport(), accelerator="cpu") == []
    assert gpu_health.collect_gpu_report(0).unavailable == "no NVIDIA GPU"


def outputs(monkeypatch: pytest.MonkeyPatch, **outputs: tuple[int, str, str] | OSError) -> None:
    """Replace commands, by name, with an exit code, output and error."""

    def run(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        answer = outputs["_".join(command).replace("-", "")]
        if isinstance(answer, OSError):
            raise answer
        return subprocess.CompletedProcess(command, *answer)

    monkeypatch.setattr(subprocess, "run", run)


def test_the_report_of_a_machine_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"nvidiasmi_q_x": (0, log({}), ""), "nvidiasmi_nvlink_s": (0, LINKS, "")}
    outputs(monkeypatch, **answers, dmesg=(1, "", "read kernel buffer failed: Operation not permitted\n"))
    report = gpu_health.collect_gpu_report(1)
    assert (report.gpus, report.nvlinks, report.unavailable) == ((ONE,), (2, 1), "")
    assert report.xids_unavailable == "dmesg: read kernel buffer failed: Operation not permitted"


def test_the_commands_of_a_node_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, on a node whose driver has no persistence mode, they exceed doctor's deadline."""
    at_once = threading.Barrier(4)
    answers = {"-q": log({}), "nvlink": LINKS, "dmesg": "", "--query-compute-apps": "7, 900, python"}

    def run(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        at_once.wait(5)
        name = command[-1 if len(command) == 1 else 1].partition("=")[0]
        return subprocess.CompletedProcess(command, 0, answers[name], "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(nvidia, "count", lambda: 1)
    facts = collect.collect_facts()
    assert (facts.gpu_report.gpus, facts.gpu_report.nvlinks) == ((ONE,), (2, 1))
    assert [process.pid for process in facts.gpu_processes] == [7]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (FileNotFoundError(), "nvidia-smi is not installed"),
        ((9, "Failed to initialize NVML: Unknown Error\n", ""), "nvidia-smi: Failed to initialize NVML"),
        ((0, "not XML", ""), "nvidia-smi reports no GPU"),
    ],
)
def test_the_reason_why_a_machine_has_no_report_is_kept(
    answer: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs(monkeypatch, nvidiasmi_q_x=answer, nvidiasmi_nvlink_s=answer, dmesg=(0, "", ""))
    assert gpu_health.collect_gpu_report(1).unavailable.startswith(reason)


@given(st.text(max_size=200))
def test_any_output_can_be_parsed(text: str) -> None:
    gpu_health.health_in(text)
    gpu_health.active_links(text)
    gpu_health.xids_in(text)
