"""The headline packages are there, import, and start what they are there for."""

import subprocess
import sys
from importlib import import_module
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest

HEADLINES = ("torch", "vllm", "ray", "deepspeed", "transformers", "openrlhf", "rlhf_stack")
ENTRY_POINTS = ("train_ppo_ray", "train_sft", "train_rm", "train_dpo")
IMPORT_SECONDS = 120


@pytest.mark.parametrize("name", HEADLINES)
def test_headline_package_imports(name: str) -> None:
    """Each in this process, so that they also bear each other."""
    import_module(name)


def test_versions_are_those_of_the_matrix(cell: dict[str, Any], installed: dict[str, Distribution]) -> None:
    """No headline package is of another version than the cell's name says."""
    for package in cell["packages"]:
        version = installed[package["distribution"]].version
        assert version.split("+")[0] == package["version"], package["name"]


@pytest.mark.timeout(IMPORT_SECONDS)
@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_entry_point_shows_its_help(name: str) -> None:
    """OpenRLHF's own command lines start."""
    command = [sys.executable, "-m", f"openrlhf.cli.{name}", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "--" in done.stdout


def test_every_patch_is_present_and_unaltered() -> None:
    """What a patch made of a file is what lies there."""
    done = subprocess.run(
        [sys.executable, "-m", "rlhf_stack.patches"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_vllm_loads_its_compiled_ops() -> None:
    """vLLM only warns when its library does not load; an engine dies of it later, without saying so."""
    import torch
    import vllm.platforms

    vllm.platforms.current_platform.import_kernels()
    assert (
        hasattr(torch.ops._C, "init_cpu_memory_env") or vllm.platforms.current_platform.device_type != "cpu"
    )


@pytest.mark.timeout(120)
def test_ray_starts_and_runs_a_task() -> None:
    """A node of its own, a task on it, and everything gone at the end."""
    import ray

    ray.init(num_cpus=1, object_store_memory=100 << 20, include_dashboard=False, _temp_dir="/tmp/ray-test")
    try:

        @ray.remote
        def where() -> str:
            return sys.executable

        assert Path(ray.get(where.remote(), timeout=60)) == Path(sys.executable)
    finally:
        ray.shutdown()
