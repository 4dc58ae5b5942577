"""What an image for GPUs imports on a machine with a GPU, which torch only reports here."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPORTED = """
import types

import torch

gpu = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132,
    gcnArchName="gfx942",
)
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_properties = lambda *_: gpu
torch.cuda.get_device_capability = lambda *_: (gpu.major, gpu.minor)
"""
TOOLKIT = Path("/opt/rlhf-stack/cuda")
KERNEL = """
#include <nccl.h>
__global__ void kernel(int *value) { *value = NCCL_MAJOR; }
extern "C" void launch(int *value) { kernel<<<1, 1>>>(value); }
"""
MODULES = ("deepspeed", "deepspeed.launcher.runner", "deepspeed.env_report", "openrlhf.cli.train_ppo_ray")


@pytest.mark.parametrize("module", MODULES)
def test_a_machine_with_a_gpu_imports(module: str, cell: dict[str, Any]) -> None:
    """DeepSpeed 0.15.0 runs nvcc when it is imported on a machine with a GPU."""
    if cell["accelerator"]["kind"] == "cpu":
        pytest.skip("this image promises no GPU")
    script = f"{REPORTED}\nimport {module}\n"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_compiler_for_cuda_links_against_the_driver_of_another_machine(tmp_path: Path) -> None:
    """As FlashInfer does for the attention of B200, and DeepSpeed with NCCL's header."""
    if not TOOLKIT.exists():
        pytest.skip("this image has no nvcc")
    (tmp_path / "kernel.cu").write_text(KERNEL)
    stubs = TOOLKIT / "lib64" / "stubs"
    command = [
        str(TOOLKIT / "bin" / "nvcc"),
        "-arch=sm_90",
        "-shared",
        "-Xcompiler=-fPIC",
        "kernel.cu",
        "-o",
        "k.so",
    ]
    subprocess.run([*command, f"-L{stubs}", "-lcuda"], cwd=tmp_path, check=True, timeout=120)
