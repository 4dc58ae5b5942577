"""DeepSpeed's compiled operators: from the image, compiled on first use, or reported as unavailable.

Without this module, the first use compiles silently, and torch waits for ever for the lock of a process that
was killed while it compiled. OpenRLHF's optimiser is selected here before DeepSpeed loads its operator.
"""

import ast
import contextlib
import fcntl
import importlib.util
import io
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from rlhf_stack.accelerator import devices
from rlhf_stack.lazy import torch

FUSED_ADAM, CPU_ADAM = "fused_adam", "cpu_adam"
BUILDERS = {FUSED_ADAM: "FusedAdamBuilder", CPU_ADAM: "CPUAdamBuilder"}
INSTALLED = "git_version_info_installed.py"  # of DeepSpeed: which operators its build has compiled
TORCH_LOCK_FILE = "lock"  # of torch.utils.cpp_extension: exists during a compilation, or after its kill
FLOCK_FILE = "rlhf-stack.lock"  # an flock: the kernel releases it when its owner ends
COMPILE_SECONDS = 1800.0
MOST_ELEMENTS, CHUNK = 2**31, 2**16  # of a tensor in a fused step of torch 2.3
POLL_SECONDS = 0.2
LOCAL_FILE_SYSTEMS = ("btrfs", "ext2", "ext3", "ext4", "overlay", "ramfs", "tmpfs", "xfs", "zfs")


def optimizer_config(config: Mapping[str, Any], offload: bool) -> dict[str, Any]:
    """Return DeepSpeed's ``optimizer`` section with an optimiser that is available (OpenRLHF 0.11).

    With ``offload`` the optimiser runs on the CPU. Raises `RuntimeError` if its operator is then unavailable.
    """
    if load_adam_operator(offload):
        return dict(config)
    fallback = {"torch_adam": True} | ({"fused": devices.is_gpu()} if config["type"] == "AdamW" else {})
    return {**config, "params": {**config["params"], **fallback}}


def adam_class(offload: bool) -> Any:
    """Return a constructor of AdamW (OpenRLHF 0.5); ``offload`` and errors as in `optimizer_config`."""
    if load_adam_operator(offload):
        from deepspeed.ops import adam

        return adam.DeepSpeedCPUAdam if offload else adam.FusedAdam
    return torch_adamw


def torch_adamw(parameters: Any, **options: Any) -> Any:
    """Return torch's AdamW, whose steps are fused on a GPU.

    DeepSpeed moves its parameters to the GPU later: torch 2.3 refuses ``fused=True`` for those on the CPU.
    """
    optimizer = torch.optim.AdamW(parameters, **options)
    for group in optimizer.param_groups:
        group["fused"] = devices.is_gpu()
    optimizer.register_step_pre_hook(refuse_overflow)
    return optimizer


def refuse_overflow(optimizer: Any, *_: Any) -> None:
    """Raise `RuntimeError` before a fused step that would write beyond a tensor.

    torch 2.3 counts elements in 32 bits (pytorch/pytorch#137368): in a tensor of 2^31 elements or more it
    takes an incomplete last chunk for a whole one. ZeRO-2 has all of a rank's elements in one tensor.
    """
    for group in optimizer.param_groups:
        sizes = [tensor.numel() for tensor in group["params"]]
        if group["fused"] and any(size >= MOST_ELEMENTS and size % CHUNK for size in sizes):
            raise RuntimeError(
                f"torch's fused AdamW writes beyond a tensor of {MOST_ELEMENTS} elements or more, and a rank"
                f" has {max(sizes)}: train with --zero_stage 3 or on more GPUs"
            )


def load_adam_operator(offload: bool) -> bool:
    """Load the operator of DeepSpeed's Adam; False, logged by rank 0, if torch's own is used instead."""
    name = CPU_ADAM if offload else FUSED_ADAM
    missing = [] if is_built(name) else missing_build_tools()
    if not missing:
        load(name)
        return True
    why = f"DeepSpeed's {name} is not in this image and cannot be compiled (no {', no '.join(missing)})"
    if offload:
        raise RuntimeError(
            f"{why}: train without offloading the optimiser, or derive an image that has these tools"
        )
    if os.environ.get("RANK", "0") == "0":
        log_line(f"{why}: torch.optim.AdamW is used instead, with equal results")
    return False


def missing_for(name: str) -> list[str]:
    """List the tools without which operator ``name`` is unavailable here; none if it is built.

    Also none without DeepSpeed. Reads files, because DeepSpeed takes seconds to import and selects another
    accelerator on a machine without GPUs, where a run may be planned.
    """
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        return []
    file = Path(spec.origin).with_name(INSTALLED)
    installed = _constants(file.read_text(encoding="utf-8")) if file.is_file() else {}
    accelerator = "cuda" if devices.is_gpu() else "cpu"  # DeepSpeed's names; ROCm is cuda
    if installed.get("installed_ops", {}).get(name) and installed.get("accelerator_name") == accelerator:
        return []
    with contextlib.redirect_stderr(io.StringIO()):  # torch prints there that it finds no GPU
        return missing_build_tools()


def _constants(source: str) -> dict[str, Any]:
    """The names in ``source`` to which constants are assigned, with these."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            with contextlib.suppress(ValueError):
                found[node.targets[0].id] = ast.literal_eval(node.value)
    return found


def load(name: str) -> None:
    """Load an operator, compiling it if the image does not have it; DeepSpeed then finds it loaded."""
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder(BUILDERS[name])
    if is_built(name):
        builder.load(verbose=False)
        return
    from torch.utils import cpp_extension

    with compilation_lock(name, Path(cpp_extension._get_build_directory(builder.name, verbose=False))):
        builder.load(verbose=False)


def is_built(name: str) -> bool:
    """Report whether DeepSpeed was installed with the operator for the accelerator of this process."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import accelerator_name, installed_ops

    return bool(installed_ops.get(name)) and accelerator_name == get_accelerator()._name


def missing_build_tools() -> list[str]:
    """List the tools that compiling an operator needs and this machine lacks."""
    from torch.utils import cpp_extension

    present = {
        "ninja": shutil.which("ninja"),
        "C++ compiler": shutil.which(os.environ.get("CXX", "c++")),
        "Python.h": Path(sysconfig.get_paths()["include"], "Python.h").exists(),
    }
    if devices.is_gpu():
        compilers = {"cuda": ("nvcc", cpp_extension.CUDA_HOME), "rocm": ("hipcc", cpp_extension.ROCM_HOME)}
        name, home = compilers[devices.kind()]
        present[name] = home and Path(home, "bin", name).exists()
    return [name for name, exists in present.items() if not exists]


@contextlib.contextmanager
def compilation_lock(name: str, folder: Path, timeout: float = COMPILE_SECONDS) -> Iterator[None]:
    """Hold the lock for compiling operator ``name`` in ``folder``: one process at a time, others wait.

    Removes the torch lock of a process that was killed. Raises `TimeoutError` after ``timeout`` seconds.
    On a file system without locks only torch's serializes, which is then never removed.
    """
    deadline = time.monotonic() + timeout
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FLOCK_FILE).open("w") as lock:
        if not _can_be_locked(lock):
            log_line(f"no locks on this file system: {folder}")
            yield
            return
        if not _acquired(lock):
            log_line(f"waiting for another process that compiles DeepSpeed's {name} in {folder}")
        while not _acquired(lock):
            _pause(deadline, f"another process compiles DeepSpeed's {name} in {folder}", timeout)
        torch_lock = folder / TORCH_LOCK_FILE
        while torch_lock.exists() and is_held(torch_lock):
            _pause(deadline, f"a live process holds {torch_lock}", timeout)
        if torch_lock.exists():
            torch_lock.unlink(missing_ok=True)
            log_line(f"removed {torch_lock}, the stale lock of a process that was killed while it compiled")
        log_line(f"compiling DeepSpeed's {name}, about a minute, in {folder}")
        yield


def stale_locks(root: Path, least: float = 0.0) -> list[Path]:
    """List torch's locks below ``root`` that no build holds; each blocks later compilations for ever.

    Younger ones than ``least`` seconds are omitted; see `is_stale`.
    """
    return [lock for lock in sorted(root.glob(f"**/{TORCH_LOCK_FILE}")) if is_stale(lock, least)]


def is_stale(lock: Path, least: float = 0.0) -> bool:
    """Report whether the owner of torch's ``lock`` is dead and it is at least ``least`` seconds old.

    It is not while a build of this distribution holds its own lock next to it, also on another node: the
    kernel shares these over NFS. On a network file system another node's owner is not visible otherwise, so
    that a lock there counts as stale only when no compilation could still be running.
    """
    with _free_build_lock(lock.parent) as is_free:
        return is_free and _is_abandoned(lock, least)


def remove_stale_lock(lock: Path, least: float = 0.0) -> bool:
    """Remove torch's ``lock`` if it `is_stale`, while no build can start; report whether it is gone."""
    with _free_build_lock(lock.parent) as is_free:
        if is_free and _is_abandoned(lock, least):
            lock.unlink(missing_ok=True)
    return not lock.exists()


def _is_abandoned(lock: Path, least: float) -> bool:
    """Report whether ``lock`` is old enough and no visible process has it open."""
    try:
        age = time.time() - lock.stat().st_mtime
        return age >= (least if _is_local(lock) else max(least, COMPILE_SECONDS)) and not is_held(lock)
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _free_build_lock(folder: Path) -> Iterator[bool]:
    """Hold the lock of builds in ``folder`` if it is free, and yield whether it was; it is not created."""
    try:
        file = (folder / FLOCK_FILE).open("r+")
    except OSError:  # no build of this distribution was here, or it is another user's
        yield not (folder / FLOCK_FILE).exists()
        return
    with file:
        try:
            is_free = _acquired(file)
        except OSError:  # a file system without locks, as NFS may be: it is not known to be free
            is_free = False
        yield is_free


def _is_local(path: Path) -> bool:
    """Report whether ``path`` is on a file system of this machine alone."""
    best, kind = "", ""
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        before, _, after = line.partition(" - ")
        point = before.split()[4]
        if len(point) >= len(best) and path.resolve().is_relative_to(point):
            best, kind = point, after.split()[0]
    return kind in LOCAL_FILE_SYSTEMS


def extensions_directory() -> Path:
    """Return the directory in which torch compiles operators for this user."""
    directory = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(directory) if directory else Path.home() / ".cache" / "torch_extensions"


def log_line(line: str) -> None:
    """Print a line to stderr."""
    print(f"rlhf-stack: {line}", file=sys.stderr, flush=True)


def _acquired(file: IO[str]) -> bool:
    """Try to lock ``file``; report whether this process has the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _can_be_locked(file: IO[str]) -> bool:
    """Report whether the file system of ``file`` has locks, as NFS may not."""
    try:
        _acquired(file)
    except OSError:
        return False
    return True


def _pause(deadline: float, reason: str, timeout: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"waited {timeout:.0f} s: {reason}")
    time.sleep(POLL_SECONDS)


def is_held(path: Path) -> bool:
    """Report whether a visible process of this machine has ``path`` open, so that its owner is alive."""
    status = path.stat()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            found = link.stat()
            if (found.st_dev, found.st_ino) == (status.st_dev, status.st_ino):
                return True
    return False
