"""Collects the facts of this node in under a second, without importing torch, ray or vllm."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.utils import canonicalize_name

from rlhf_stack.accelerator import nvidia, rocm
from rlhf_stack.cleanup import process_table, stale_resources
from rlhf_stack.cleanup.process_table import Process
from rlhf_stack.cluster.host import is_taken
from rlhf_stack.compat import attention_provider, deepspeed_ops
from rlhf_stack.config import env_vars, image
from rlhf_stack.diagnostics import installed_patches
from rlhf_stack.diagnostics.doctor import libraries
from rlhf_stack.diagnostics.doctor.collect_rdma import collect_rdma
from rlhf_stack.diagnostics.doctor.facts import (
    OF_ONE_PROCESS,
    Disk,
    GpuProcess,
    GpuReport,
    Library,
    NodeFacts,
    Patch,
    RayProcess,
    relevant_variables,
)
from rlhf_stack.diagnostics.doctor.gpu_health import SMI_SECONDS, collect_gpu_report
from rlhf_stack.diagnostics.host_check import amd_gpus, nvidia_driver

PORTS = (6379, 8265, 10001)
SHM = Path("/dev/shm")  # noqa: S108  (the location of Ray's objects)
BUILT_FOR = re.compile(r"^(cuda|hip)\b[^=]*= *['\"]([\d.]+)", re.MULTILINE)
ENGINE_LIBRARY = "VLLM_NCCL_SO_PATH"
TRAINER_LIBRARIES = ("nvidia/nccl/lib/libnccl.so.2", "torch/lib/libnccl.so.2", "torch/lib/librccl.so")
STARTED_ROLES = (process_table.RAYLET, process_table.DRIVER, process_table.WORKER)
# Workers without the variables of a job: those that wait for one, and Ray's own, which starts its driver.
WITHOUT_JOB = ("ray::IDLE", "ray::JobSupervisor")


def collect_facts() -> NodeFacts:
    """Collect the facts of this node."""
    table = process_table.snapshot()
    with ThreadPoolExecutor() as pool:  # at once, as the commands of the report
        gpu_processes = pool.submit(_gpu_processes, {process.pid for process in table})
        gpu_report = collect_gpu_report(nvidia.count())
    shm = shutil.disk_usage(SHM) if SHM.is_dir() else None
    found, missing = _libraries()
    accelerator = env_vars.accelerator() or _guessed_accelerator()
    return NodeFacts(
        host=socket.gethostname(),
        accelerator=accelerator,
        versions=_versions(),
        patches=_patches(),
        variables=relevant_variables(node_variables(table, os.environ)),
        ray_processes=_ray_processes(table),
        resources=process_table.declared_resources(table),
        gpus=_gpus(),
        driver=rocm.driver() if accelerator == "rocm" else nvidia_driver(),
        built_for=_built_for(),
        libraries=found,
        missing_library=missing,
        shm_total=shm.total if shm else 0,
        shm_free=shm.free if shm else 0,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        resolves_to=_resolves_to(),
        taken_ports=tuple(port for port in PORTS if is_taken("", port)),
        disks=_disks(),
        stale_locks=tuple(map(str, deepspeed_ops.stale_locks(deepspeed_ops.extensions_directory()))),
        stale_processes=tuple(
            f"{p.pid} {p.line[:80]}" for p in stale_resources.orphaned_workers(table, os.getuid())
        ),
        gpu_processes=gpu_processes.result(),
        rdma=collect_rdma(),
        gpu_report=gpu_report,
        attention=attention_provider.provider(),
        expected_missing=bool(missing) and image.stand_in_defaults().get(ENGINE_LIBRARY) == missing,
        gpu_models=gpu_models(gpu_report),
        inputs=image.about().inputs,
    )


def node_variables(table: Iterable[Process], here: Mapping[str, str]) -> dict[str, str]:
    """The environment of this node: ``here``, or in a worker of Ray with the raylet's of `OF_ONE_PROCESS`."""
    by_pid = {process.pid: process for process in table}
    own = by_pid.get(os.getpid())
    if own is None or own.role != process_table.WORKER:
        return dict(here)
    raylet = by_pid.get(own.parent)
    variables = (raylet.variables if raylet else None) or {}
    kept = {name: value for name, value in here.items() if name not in OF_ONE_PROCESS}
    return kept | {name: variables[name] for name in OF_ONE_PROCESS if name in variables}


def _versions() -> dict[str, str]:
    """The installed versions by canonical name, with those of "python" and "glibc"."""
    found = {
        str(canonicalize_name(distribution.metadata["Name"])): distribution.version
        for distribution in importlib.metadata.distributions()
        if distribution.metadata["Name"]
    }
    library, version = platform.libc_ver()
    return found | {"python": platform.python_version()} | ({"glibc": version} if library == "glibc" else {})


def _patches() -> tuple[Patch, ...]:
    reports = installed_patches.patch_statuses(
        installed_patches.manifests(), installed_patches.installed_checksum
    )
    return tuple(Patch(one.package, installed_patches.slug(one.patch), one.state, one.why) for one in reports)


def _ray_processes(table: Iterable[Process]) -> tuple[RayProcess, ...]:
    """The raylet, drivers and workers of jobs of this node whose environment is readable."""
    return tuple(
        RayProcess(process.role, process.pid, process.line[:60], relevant_variables(process.variables))
        for process in table
        if process.role in STARTED_ROLES
        and process.variables is not None
        and process.pid != os.getpid()  # a task of this command
        and not process.line.startswith(WITHOUT_JOB)
    )


def _guessed_accelerator() -> str | None:
    """The accelerator that torch was built for, outside our images; None if torch is not installed."""
    built = _built_for()
    if built:
        return "rocm" if built.startswith("hip") else "cuda"
    return "cpu" if importlib.util.find_spec("torch") else None


def _built_for() -> str:
    """The platform that torch was built for, such as "cuda 12.1" or "hip 6.1"; "" for a CPU or no torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    file = Path(spec.origin).with_name("version.py")
    found = BUILT_FOR.search(file.read_text(encoding="utf-8")) if file.is_file() else None
    return f"{found[1]} {found[2]}" if found else ""


def _gpus() -> int:
    """The number of GPUs of this machine, including hidden ones."""
    return nvidia.count() or rocm.kernel_count()


def gpu_models(report: GpuReport) -> tuple[str, ...]:
    """The model of each GPU, from the first of nvidia-smi, NVML, NVIDIA's driver and amdgpu that has any."""
    return (
        tuple(gpu.name for gpu in report.gpus if gpu.name)
        or nvidia.models()
        or rocm.product_names()
        or tuple(f"{gpu.name} {gpu.architecture}" for gpu in amd_gpus())
    )


def _gpu_processes(seen: set[int]) -> tuple[GpuProcess, ...]:
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory,name", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return gpu_processes_in(done.stdout, seen) if done.returncode == 0 else ()


def gpu_processes_in(listing: str, seen: set[int]) -> tuple[GpuProcess, ...]:
    """The processes in the output of nvidia-smi; ``seen`` are the pids that are visible here."""
    rows = [[field.strip() for field in line.split(",", 2)] for line in listing.splitlines()]
    return tuple(
        GpuProcess(int(pid), int(used) if used.isdecimal() else 0, name, int(pid) in seen)
        for pid, used, name in (row for row in rows if len(row) == 3)
        if pid.isdecimal()
    )


def _libraries() -> tuple[tuple[Library, ...], str]:
    """The NCCL or RCCL of trainer and engine, and the value of VLLM_NCCL_SO_PATH if it is not a file."""
    trainer = next((path for path in _candidates() if path.is_file()), None)
    named = os.environ.get(ENGINE_LIBRARY, "")
    engine = Path(named) if named and Path(named).is_file() else None
    found = []
    for user, path in (("trainer", trainer), ("engine", engine or trainer)):
        if path:
            found.append(Library(user, str(path), libraries.version(path), libraries.build_id(path)))
    return tuple(found), named if named and engine is None else ""


def _candidates() -> list[Path]:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return []
    return [Path(spec.origin).parent.parent / name for name in TRAINER_LIBRARIES]


def _resolves_to() -> str:
    """The address that this host's name resolves to, or ""."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _disks() -> tuple[Disk, ...]:
    """The file systems of Ray's session and of the model cache."""
    home = Path(os.environ.get("HF_HOME") or Path.home())
    found: dict[int, Disk] = {}
    for path in (Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()), home):
        existing = next((folder for folder in (path, *path.parents) if folder.exists()), None)
        if existing:
            usage = shutil.disk_usage(existing)
            found.setdefault(existing.stat().st_dev, Disk(str(existing), usage.total, usage.free))
    return tuple(found.values())
