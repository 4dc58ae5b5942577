"""The headline packages are installed, import, and start their commands and services."""

import importlib.util
import subprocess
import sys
from importlib import import_module
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest

HELP_SECONDS = 180


def test_headline_package_imports(headline: str) -> None:
    """All in this process, so that they are also compatible with each other."""
    import_module(headline)


def test_the_runtime_imports() -> None:
    """Our package, which the patches call."""
    import_module("rlhf_stack")


def test_versions_are_those_of_the_matrix(cell: dict[str, Any], headlines: dict[str, Distribution]) -> None:
    """Each headline package has the version of the cell's name."""
    found = {name: distribution.version.split("+")[0] for name, distribution in headlines.items()}
    assert found == {package["name"]: package["version"] for package in cell["packages"]}


@pytest.mark.timeout(HELP_SECONDS)
def test_entry_point_shows_its_help(entry_point: str) -> None:
    """Each of OpenRLHF's own command lines starts."""
    command = [sys.executable, "-m", f"openrlhf.cli.{entry_point}", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "--" in done.stdout


def test_every_patch_is_present_and_unaltered() -> None:
    """Every patched file has the content that its patch produced."""
    done = subprocess.run(
        [sys.executable, "-m", "rlhf_stack", "patches"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_vllm_loads_its_compiled_ops(cell: dict[str, Any]) -> None:
    """vLLM only warns when its library does not load, and an engine later fails without naming the cause."""
    if cell["accelerator"]["kind"] != "cpu":
        pytest.skip("needs a GPU and its driver; test_libraries.py checks for missing libraries")
    import torch

    platforms = importlib.util.find_spec("vllm.platforms")
    if platforms is None:  # before vLLM 0.5
        import_module("vllm._C")
    else:
        import_module("vllm.platforms").current_platform.import_kernels()
        assert hasattr(torch.ops._C, "init_cpu_memory_env")


@pytest.mark.timeout(120)
def test_ray_starts_and_runs_a_task() -> None:
    """Start a separate node, run a task on it, and shut it down."""
    import ray

    ray.init(num_cpus=1, object_store_memory=100 << 20, include_dashboard=False, _temp_dir="/tmp/ray-test")
    try:

        @ray.remote
        def where() -> str:
            return sys.executable

        assert Path(ray.get(where.remote(), timeout=60)) == Path(sys.executable)
    finally:
        ray.shutdown()
