"""What an image for GPUs imports on a machine with a GPU, which torch only reports here."""

import subprocess
import sys
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
