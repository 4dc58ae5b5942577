"""Which images run on which machines, and the file that says so without an image."""

import ast
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rlhf_stack.diagnostics import host_check
from rlhf_stack.diagnostics.host_check import CELLS, Gpu, Machine, obstacles

LEGACY, CURRENT = "ray2.12.0-vllm0.4.2-cuda12.1", "ray2.55.0-vllm0.29.0-cuda13.0"
ROCM, CPU = "ray2.12.0-vllm0.4.2-rocm6.1", "ray2.55.0-vllm0.29.0-cpu"
H100 = Gpu("cuda", "NVIDIA H100 80GB HBM3", "9.0")
NODE = Machine(
    "x86_64", "2.35", (H100,) * 8, "580.95.05", ("docker",), nvidia_toolkit=True, is_container=False
)


def reasons(machine: Machine, cell: str) -> str:
    """Why the image does not run, "" if it does."""
    return "; ".join(obstacles(machine, next(one for one in CELLS if one.id == cell)))


def gpu(architecture: str, kind: str = "cuda") -> dict[str, tuple[Gpu, ...]]:
    return {"gpus": (Gpu(kind, "a GPU", architecture),)}


@pytest.mark.parametrize(
    ("changes", "cell", "reason"),
    [
        ({}, CURRENT, ""),
        ({}, LEGACY, ""),
        ({}, CPU, ""),
        ({}, ROCM, "no AMD GPU"),
        ({"driver": "570.172.08"}, CURRENT, "driver 570.172.08 is older than 580.65.06"),
        ({"driver": "580.65.06"}, CURRENT, ""),
        ({"driver": "535.288.01"}, LEGACY, ""),
        ({"driver": "525.60.13"}, LEGACY, ""),
        ({"driver": "525.60.11"}, LEGACY, "older than 525.60.13"),
        ({"driver": "470.256.02"}, LEGACY, "older than 525.60.13"),
        ({"driver": ""}, CURRENT, "driver is not loaded"),
        (gpu("8.0"), LEGACY, ""),
        (gpu("7.0"), LEGACY, "compute capability 8.0 to 9.0, not 7.0"),
        (gpu("7.0"), CURRENT, "compute capability 8.0 to 12.0, not 7.0"),
        (gpu("10.0"), CURRENT, ""),
        (gpu("10.3"), CURRENT, ""),
        (gpu("12.1"), CURRENT, ""),
        (gpu("10.0"), LEGACY, "compute capability 8.0 to 9.0, not 10.0"),
        (gpu(""), LEGACY, ""),
        (gpu("gfx942", "rocm"), ROCM, ""),
        (gpu("gfx1100", "rocm"), ROCM, "target gfx90a and gfx942, not gfx1100"),
        ({"gpus": ()}, CURRENT, "no NVIDIA GPU"),
        ({"architecture": "aarch64"}, CPU, "for x86_64, not aarch64"),
        ({"nvidia_toolkit": False}, CURRENT, "docker has no NVIDIA Container Toolkit"),
        ({"nvidia_toolkit": False}, CPU, ""),
        ({"nvidia_toolkit": False, "runtimes": ("apptainer",)}, CURRENT, ""),
        ({"runtimes": ()}, CPU, "no container runtime"),
        ({"runtimes": (), "nvidia_toolkit": False, "is_container": True}, CURRENT, ""),
    ],
)
def test_each_reason_is_given(changes: dict[str, object], cell: str, reason: str) -> None:
    found = reasons(replace(NODE, **changes), cell)  # type: ignore[arg-type]
    assert reason in found
    assert bool(reason) == bool(found)


def test_several_reasons_are_all_given() -> None:
    old = replace(NODE, driver="470.256.02", gpus=gpu("7.0")["gpus"])
    assert "compute capability" in reasons(old, CURRENT)
    assert "driver" in reasons(old, CURRENT)


def test_driver_of_each_cuda_release_follows_its_major_version() -> None:
    """NVIDIA's minor version compatibility: the first driver of a major version runs all of its releases."""
    assert host_check.oldest_driver("12.1") == host_check.oldest_driver("12.9") == "525.60.13"
    assert host_check.oldest_driver("13.0") == "580.65.06"
    assert host_check.oldest_driver("11.8") == ""


def test_output_of_nvidia_smi_and_kernel_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert (
        host_check.nvidia_gpus("NVIDIA L4, 8.9\nNVIDIA L4, 8.9\n") == (Gpu("cuda", "NVIDIA L4", "8.9"),) * 2
    )
    assert host_check.nvidia_gpus("Tesla V100-SXM2-32GB\n") == (Gpu("cuda", "Tesla V100-SXM2-32GB", ""),)
    assert [host_check.gfx(version) for version in (90402, 90010, 110000)] == ["gfx942", "gfx90a", "gfx1100"]
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n")
    for number, target in enumerate((0, 90402, 90402)):  # node 0 is a CPU
        properties = tmp_path / "nodes" / str(number) / "properties"
        properties.parent.mkdir(parents=True)
        properties.write_text(f"simd_count {4 * number}\ngfx_target_version {target}\n")
    monkeypatch.setattr(host_check, "NVIDIA_DRIVER", driver)
    monkeypatch.setattr(host_check, "AMD_NODES", tmp_path / "nodes")
    machine = host_check.inspect_machine()
    assert machine.driver == "580.95.05"
    assert [one.architecture for one in machine.gpus if one.kind == "rocm"] == ["gfx942", "gfx942"]


@pytest.mark.parametrize(("driver", "code"), [("470.256.02", 1), ("535.288.01", 0)])
def test_exit_code_is_about_the_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], driver: str, code: int
) -> None:
    monkeypatch.setattr(host_check, "inspect_machine", lambda: replace(NODE, driver=driver))
    assert host_check.main([]) == code
    printed = capsys.readouterr().out
    assert "8 x NVIDIA H100 80GB HBM3, compute capability 9.0" in printed
    assert f"driver {driver} is older than 580.65.06" in printed


def test_the_file_runs_alone_and_on_old_pythons(tmp_path: Path) -> None:
    source = Path(host_check.__file__).read_text(encoding="utf-8")
    ast.parse(source, feature_version=(3, 8))
    alone = tmp_path / "host_check.py"
    alone.write_text(source, encoding="utf-8")
    command = [sys.executable, "-I", str(alone), "--json"]  # isolated from this checkout
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    printed = json.loads(done.stdout)
    assert printed["schema"] == "rlhf-stack/host/1"
    assert [cell["id"] for cell in printed["cells"]] == [cell.id for cell in CELLS]
    assert all(cell["runs"] == (not cell["reasons"]) for cell in printed["cells"])
