"""Findings of doctor in this image, and for failures that the tests provoke in it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rlhf_stack.config import env_vars

HEAVY = ("torch", "ray", "vllm", "deepspeed", "transformers", "openrlhf")
WITHOUT_HEAVY = f"""
import builtins
found = builtins.__import__
def refuse(name, *rest, **named):
    if name.split(".")[0] in {HEAVY}:
        raise ImportError(name)
    return found(name, *rest, **named)
builtins.__import__ = refuse
from rlhf_stack.cli.main import main
main()
"""
MACHINE_FINDINGS = {"disk", *(["gpus"] if env_vars.accelerator() != "cpu" else [])}  # no GPU is available
PORT = "7391"
GLOO = """
import torch.distributed as group
group.init_process_group("gloo", store=group.HashStore(), rank=0, world_size=1)
"""
NO_CLUSTER = "import ray; ray.init(address='auto')"


def doctor(*arguments: str, log: str = "") -> dict[str, Any]:
    """Return doctor's JSON result."""
    command = ["rlhf-stack", "doctor", "--json", *arguments]
    done = subprocess.run(command, input=log, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def ids(answer: dict[str, Any]) -> list[str]:
    return [finding["id"] for finding in answer["findings"]]


@pytest.fixture
def stopped() -> Iterator[None]:
    """End what a failed `ray start` leaves behind."""
    yield
    subprocess.run(["ray", "stop", "--force"], capture_output=True, check=False)


def test_the_image_has_no_error() -> None:
    """doctor finds no error in versions, patches and variables; findings about the machine are ignored."""
    found = {
        finding["id"]: finding
        for finding in doctor("--local")["findings"]
        if finding["id"] not in MACHINE_FINDINGS
    }
    assert [one for one in found.values() if one["severity"] == "error"] == []
    assert [one for one in found.values() if one["sources"] and one["severity"] == "warning"] == []
    assert found["patches"]["severity"] == "ok"


def test_it_works_without_slow_imports() -> None:
    """Without a Ray node, the findings are the same when these packages cannot be imported."""
    command = [sys.executable, "-c", WITHOUT_HEAVY, "doctor", "--local", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert ids(json.loads(done.stdout)) == ids(doctor("--local"))


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("stopped")
def test_more_gpus_than_are_visible_are_explained() -> None:
    """doctor recognises this Ray's message."""
    done = subprocess.run(
        ["ray", "start", "--head", "--port", PORT, "--num-gpus", "3", "--include-dashboard", "false"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "0,1", "RAY_TMPDIR": "/tmp"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert ids(doctor("--log", "-", log=done.stdout + done.stderr)) == ["more-gpus-declared-than-visible"]


@pytest.mark.timeout(120)
def test_a_missing_interface_is_explained() -> None:
    """doctor recognises this torch's message."""
    done = subprocess.run(
        [sys.executable, "-c", GLOO],
        env=os.environ | {"GLOO_SOCKET_IFNAME": "eth9"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert ids(doctor("--log", "-", log=done.stderr)) == ["gloo-no-such-interface"]


@pytest.mark.timeout(120)
def test_a_missing_cluster_is_explained(tmp_path: Path) -> None:
    """doctor recognises this Ray's message."""
    done = subprocess.run(
        [sys.executable, "-c", NO_CLUSTER],
        env=os.environ | {"RAY_TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert ids(doctor("--log", "-", log=done.stderr)) == ["no-cluster"]


def test_a_stale_build_lock_is_named(tmp_path: Path) -> None:
    """A lock that is still held is not reported."""
    stale, held = tmp_path / "a" / "lock", tmp_path / "b" / "lock"
    for lock in (stale, held):
        lock.parent.mkdir()
        lock.touch()
    with held.open():
        command = ["rlhf-stack", "doctor", "--json", "--local"]
        environment = os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    found = [one for one in json.loads(done.stdout)["findings"] if one["id"] == "build-lock"]
    assert [one["evidence"] for one in found] == [str(stale)]
    assert done.returncode == 3
