"""A kit runs from its pieces with the Python that is there, and says what it did not climb."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts.errors import UserError
from scripts.release import gpu_kit
from tests.unit.scripts.release.test_kernels import damaged_wheel

TORCH = """
__version__ = "0.0"
class cuda:
    device_count = staticmethod(lambda: 0)
    is_available = staticmethod(lambda: False)
class version:
    cuda = hip = None
"""


def test_pieces_have_the_size_and_are_checked(tmp_path: Path) -> None:
    pieces = gpu_kit.pack(tmp_path / "kit", 100_000)
    assert len(pieces) > 1
    assert [piece.stat().st_size for piece in pieces[:-1]] == [100_000] * (len(pieces) - 1)
    again = gpu_kit.pack(tmp_path / "again", 100_000)
    assert [piece.read_bytes() for piece in pieces] == [piece.read_bytes() for piece in again]
    pieces[0].write_bytes(b"broken")
    done = subprocess.run(
        ["bash", str(tmp_path / "kit" / "run.sh")], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert f"{pieces[0].name}: FAILED" in done.stdout
    with pytest.raises(UserError, match="exists already"):
        gpu_kit.pack(tmp_path / "kit", 100_000)


def test_it_runs_anywhere_and_names_what_was_not_climbed(tmp_path: Path) -> None:
    """The torch of this test has no function, so every rung fails or is not climbed, none silently."""
    wheel = tmp_path / "torch-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("torch/__init__.py", TORCH)
    gpu_kit.pack(tmp_path / "kit", 10**6, [wheel])
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without any package
    (bin_ / "python3").chmod(0o755)

    def run(kit: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["bash", str(tmp_path / kit / "run.sh"), str(tmp_path / "out")],
            env={"PATH": f"{bin_}:{os.environ['PATH']}", "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )

    gpu_kit.pack(tmp_path / "without", 10**6)
    assert "has no torch" in run("without").stderr
    done = run("kit")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "it exists already" in run("kit").stderr
    content = json.loads((tmp_path / "out" / "certificate.json").read_text())
    assert content["subject"] == {
        "cell": "",
        "release": "",
        "inputs": "",
        "kit": gpu_kit.digest(gpu_kit.files()),
    }
    states = {rung["name"]: (rung["state"], rung["reason"]) for rung in content["rungs"]}
    assert states["sync"] == ("not climbed", "it needs Ray, vLLM and OpenRLHF of an image")
    assert states["streams"] == ("not climbed", "NCCL and CUDA streams need a GPU")
    failed = {name: reason for name, (state, reason) in states.items() if state == "failed"}
    assert "device-memory" in failed
    assert all("torch" in reason for reason in failed.values()), failed


def test_what_is_no_wheel_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.whl").write_text("no")
    (tmp_path / "y.whl").write_bytes(damaged_wheel())
    damaged = "not a wheel, or damaged"
    refused = {"x.whl": f"{damaged}: File is not a zip", "y.whl": damaged, "absent.whl": "No such file"}
    for name, why in refused.items():
        with pytest.raises(UserError, match=f"{name}: {why}"):
            gpu_kit.pack(tmp_path / "kit", 10**6, [tmp_path / name])
