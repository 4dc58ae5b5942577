"""Report which images run on this machine, and why the others do not: GPU, driver, container runtime.

`rlhf-stack doctor --host` runs this in an image. The file also runs by itself, with Python 3.8 or newer and
no package, on a machine that has no image yet: ``python3 host_check.py [--json]``. It changes nothing. With
--json it prints rlhf-stack/host/1: `machine` (what was found) and `cells` (id, runs, and `reasons` why not).
Exit code: 0 if an image runs on the GPUs of this machine, or on its CPUs if it has no GPU; otherwise 1.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

SCHEMA = "rlhf-stack/host/1"
SMI_SECONDS = 20
MACHINE = "x86_64"
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
CDI = (Path("/etc/cdi/nvidia.yaml"), Path("/var/run/cdi/nvidia.yaml"))
INSIDE = (Path("/.dockerenv"), Path("/run/.containerenv"))
OWN_GPU_SUPPORT = ("apptainer", "singularity")
RUNTIMES = ("docker", "podman", "nerdctl", "enroot", *OWN_GPU_SUPPORT)
TOOLKIT = ("nvidia-ctk", "nvidia-container-cli", "nvidia-container-runtime")
KINDS = {"cuda": "NVIDIA", "rocm": "AMD"}


@dataclass(frozen=True)
class Cell:
    """An image. For CUDA, ``architectures`` are the oldest and newest compute capability.

    ``driver`` is the oldest NVIDIA driver, or for AMD the driver in words; "" for a CPU.
    """

    id: str
    accelerator: str
    architectures: tuple[str, ...]
    driver: str
    was_built: bool

    @property
    def kind(self) -> str:
        """The accelerator without its version."""
        return self.accelerator.rstrip("0123456789.")


@dataclass(frozen=True)
class Gpu:
    """A GPU; ``architecture`` is its compute capability or gfx target, "" if unknown."""

    kind: str
    name: str
    architecture: str


@dataclass(frozen=True)
class Machine:
    """The facts about a machine; "" for a version that is absent or unknown."""

    architecture: str
    glibc: str
    gpus: tuple[Gpu, ...]
    driver: str
    runtimes: tuple[str, ...]
    nvidia_toolkit: bool
    is_container: bool


# cells: begin, written by python -m scripts matrix host-cells
CELLS: tuple[Cell, ...] = (
    Cell("ray2.55.0-vllm0.29.0-cpu", "cpu", (), "", True),
    Cell("ray2.12.0-vllm0.4.2-cpu", "cpu", (), "", True),
    Cell("ray2.9.3-vllm0.4.2-cpu", "cpu", (), "", True),
    Cell("ray2.12.0-vllm0.4.2-cuda12.1", "cuda12.1", ("8.0", "9.0"), "525.60.13", True),
    Cell("ray2.9.3-vllm0.4.2-cuda12.1", "cuda12.1", ("8.0", "9.0"), "525.60.13", True),
    Cell("ray2.55.0-vllm0.29.0-cuda13.0", "cuda13.0", ("8.0", "12.0"), "580.65.06", True),
    Cell("ray2.12.0-vllm0.4.2-rocm6.1", "rocm6.1", ("gfx90a", "gfx942"), "amdgpu of ROCm 6.1", False),
    Cell("ray2.9.3-vllm0.4.2-rocm6.1", "rocm6.1", ("gfx90a", "gfx942"), "amdgpu of ROCm 6.1", False),
    Cell("ray2.55.0-vllm0.29.0-rocm7", "rocm7", ("gfx942",), "amdgpu of ROCm 7.2", False),
)
# cells: end


def obstacles(machine: Machine, cell: Cell) -> list[str]:
    """Return the reasons why the image of ``cell`` does not run on ``machine``; empty if it does."""
    found = [] if machine.architecture == MACHINE else [f"it is for {MACHINE}, not {machine.architecture}"]
    if not machine.runtimes and not machine.is_container:
        found.append(f"no container runtime is installed ({', '.join(RUNTIMES)})")
    if cell.kind in KINDS:
        found += _gpu_obstacles(machine, cell)
    return found


def _gpu_obstacles(machine: Machine, cell: Cell) -> list[str]:
    gpus = [gpu for gpu in machine.gpus if gpu.kind == cell.kind]
    if not gpus:
        return [f"no {KINDS[cell.kind]} GPU was found"]
    found = []
    known = {gpu.architecture: gpu.name for gpu in gpus if gpu.architecture}
    if known and not any(supports(cell, architecture) for architecture in known):
        noun = "compute capability" if cell.kind == "cuda" else "target"
        joined = " to " if cell.kind == "cuda" else " and "
        have = ", ".join(f"{architecture} ({name})" for architecture, name in known.items())
        found.append(f"its code is for {noun} {joined.join(cell.architectures)}, not {have}")
    if cell.kind == "rocm":
        return found
    if not machine.driver:
        found.append("the NVIDIA driver is not loaded")
    elif numbers(machine.driver) < numbers(cell.driver):
        found.append(f"driver {machine.driver} is older than {cell.driver}")
    has_support = machine.nvidia_toolkit or any(name in OWN_GPU_SUPPORT for name in machine.runtimes)
    if machine.runtimes and not has_support:
        found.append(f"{machine.runtimes[0]} has no NVIDIA Container Toolkit: install it")
    return found


def supports(cell: Cell, architecture: str) -> bool:
    """Whether code of ``cell`` runs on an architecture; CUDA's also runs on later ones of a major version."""
    if cell.kind == "rocm":
        return architecture in cell.architectures
    oldest, newest = (numbers(version) for version in cell.architectures)
    return oldest <= numbers(architecture) and numbers(architecture)[0] <= newest[0]


def oldest_driver(cuda: str) -> str:
    """Return the oldest NVIDIA driver for a release of CUDA; "" if no image has its major version."""
    major = f"cuda{numbers(cuda)[0]}."
    known = [cell.driver for cell in CELLS if cell.accelerator.startswith(major)]
    return min(known, key=numbers, default="")


def numbers(version: str) -> tuple[int, ...]:
    """Return the numeric parts of a version, for comparisons."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def inspect_machine() -> Machine:
    """Read the facts of this machine."""
    return Machine(
        architecture=platform.machine(),
        glibc=platform.libc_ver()[1],
        gpus=(*nvidia_gpus(_nvidia_smi()), *amd_gpus()),
        driver=nvidia_driver(),
        runtimes=tuple(name for name in RUNTIMES if shutil.which(name)),
        nvidia_toolkit=any(map(shutil.which, TOOLKIT)) or any(file.exists() for file in CDI),
        is_container="KUBERNETES_SERVICE_HOST" in os.environ or any(file.exists() for file in INSIDE),
    )


def _nvidia_smi() -> str:
    for fields in ("name,compute_cap", "name"):  # drivers before 510 do not know the second
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        if done.returncode == 0:
            return done.stdout
    return ""


def nvidia_gpus(listing: str) -> tuple[Gpu, ...]:
    """Return the GPUs in the output of nvidia-smi: name, and compute capability where it has one."""
    rows = [line.split(", ") for line in listing.splitlines() if line.strip()]
    return tuple(Gpu("cuda", row[0].strip(), row[1].strip() if len(row) > 1 else "") for row in rows)


def nvidia_driver() -> str:
    """The version of NVIDIA's kernel module, or "" without one."""
    text = NVIDIA_DRIVER.read_text(encoding="utf-8") if NVIDIA_DRIVER.is_file() else ""
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
    return found[1] if found else ""


def amd_gpus() -> tuple[Gpu, ...]:
    """The AMD GPUs of this machine by their targets; those of other containers are unreadable."""
    targets = []
    for file in sorted(AMD_NODES.glob("*/properties")):
        try:
            found = re.search(
                r"^gfx_target_version +([1-9]\d*)$", file.read_text(encoding="ascii"), re.MULTILINE
            )
        except OSError:  # a GPU of another container
            continue
        if found:
            targets.append(gfx(int(found[1])))
    return tuple(Gpu("rocm", "AMD GPU", target) for target in targets)


def gfx(version: int) -> str:
    """Return the target that the kernel writes as a number: 90402 is gfx942, 90010 is gfx90a."""
    major, minor, step = version // 10000, version // 100 % 100, version % 100
    return f"gfx{major}{minor:x}{step:x}"


def summary(machine: Machine) -> dict[str, str]:
    """Return the facts about a machine in words."""
    counts: dict[str, int] = {}
    for gpu in machine.gpus:
        noun = "compute capability" if gpu.kind == "cuda" else "target"
        text = f"{gpu.name}, {noun} {gpu.architecture or 'unknown'}"
        counts[text] = counts.get(text, 0) + 1
    runtimes = [*machine.runtimes, *(["NVIDIA Container Toolkit"] if machine.nvidia_toolkit else [])]
    inside = "unknown: this is a container" if machine.is_container else "none found"
    return {
        "GPU": "; ".join(f"{count} x {text}" for text, count in counts.items()) or "none found",
        "driver": f"NVIDIA {machine.driver}" if machine.driver else "no NVIDIA driver",
        "machine": machine.architecture,
        "glibc": f"{machine.glibc or 'unknown'} (each image has its own)",
        "container runtime": ", ".join(runtimes) or inside,
    }


def main(arguments: list[str]) -> int:
    """Print which images run here, with the reasons why others do not; ``--json`` prints the schema above."""
    machine = inspect_machine()
    found = {cell: obstacles(machine, cell) for cell in CELLS}
    if "--json" in arguments:
        cells = [{"id": cell.id, "runs": not reasons, "reasons": reasons} for cell, reasons in found.items()]
        print(json.dumps({"schema": SCHEMA, "machine": asdict(machine), "cells": cells}, indent=1))
    else:
        for name, text in summary(machine).items():
            print(f"{name:<18} {text}")
        for cell, reasons in sorted(found.items(), key=lambda item: bool(item[1])):
            print(f"\n{'does not run' if reasons else 'runs':<18} {cell.id}")
            for line in reasons or ([] if cell.was_built else ["a recipe that was never built"]):
                print(f"{'':<18} {line}")
    needed = {gpu.kind for gpu in machine.gpus} or {"cpu"}
    return 0 if any(not reasons and cell.kind in needed for cell, reasons in found.items()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
