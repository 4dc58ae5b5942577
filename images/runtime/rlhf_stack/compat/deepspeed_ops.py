"""DeepSpeed's compiled operators: those of the image, compiled on first use, or said to be missing.

Without this, a first use compiles without a word, and torch waits for ever for the lock of a process that was
killed while it compiled. OpenRLHF's optimiser is asked for here before DeepSpeed looks for its operator.
"""

import contextlib
import fcntl
import functools
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from rlhf_stack.accelerator import devices

FUSED_ADAM, CPU_ADAM = "fused_adam", "cpu_adam"
BUILDERS = {FUSED_ADAM: "FusedAdamBuilder", CPU_ADAM: "CPUAdamBuilder"}
LOCK = "lock"  # torch.utils.cpp_extension's: it is there while somebody compiles, or did when killed
OURS = "rlhf-stack.lock"  # locked by the kernel, which lets go when its owner ends
COMPILE_SECONDS = 1800.0
POLL_SECONDS = 0.2


def optimizer(config: Mapping[str, Any], offload: bool) -> dict[str, Any]:
    """DeepSpeed's ``optimizer`` section, such that what it names is there: for OpenRLHF 0.11.

    ``offload`` is whether the optimiser works on the CPU. `RuntimeError` if its operator is not to be had.
    """
    if adam_operator(offload):
        return dict(config)
    only_here = {"torch_adam": True} | ({"fused": devices.is_gpu()} if config["type"] == "AdamW" else {})
    return {**config, "params": {**config["params"], **only_here}}


def adam(offload: bool) -> Any:
    """The class of AdamW, or what makes one: for OpenRLHF 0.5. ``offload`` and errors as in `optimizer`."""
    if adam_operator(offload):
        from deepspeed.ops import adam as of_deepspeed

        return of_deepspeed.DeepSpeedCPUAdam if offload else of_deepspeed.FusedAdam
    import torch

    return functools.partial(torch.optim.AdamW, fused=devices.is_gpu())


def adam_operator(offload: bool) -> bool:
    """Load the operator of DeepSpeed's Adam; False, said once, if torch's own takes its place."""
    name = CPU_ADAM if offload else FUSED_ADAM
    missing = [] if is_built(name) else lacking()
    if not missing:
        load(name)
        return True
    why = f"DeepSpeed's {name} is not compiled in this image and cannot be here (no {', no '.join(missing)})"
    if offload:
        raise RuntimeError(
            f"{why}: train without offloading the optimiser, which needs it, or derive an image that can"
        )
    if os.environ.get("RANK", "0") == "0":
        say(f"{why}: torch.optim.AdamW takes its place, with equal numbers")
    return False


def load(name: str) -> None:
    """Load an operator, compiled now if it is not in the image; DeepSpeed then finds it loaded."""
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder(BUILDERS[name])
    if is_built(name):
        builder.load(verbose=False)
        return
    from torch.utils import cpp_extension

    with compiling(name, Path(cpp_extension._get_build_directory(builder.name, verbose=False))):
        builder.load(verbose=False)


def is_built(name: str) -> bool:
    """Whether DeepSpeed was installed with the operator, for the accelerator of this process."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import accelerator_name, installed_ops

    return bool(installed_ops.get(name)) and accelerator_name == get_accelerator()._name


def lacking() -> list[str]:
    """What compiling an operator needs and this machine has not."""
    from torch.utils import cpp_extension

    found = {
        "ninja": shutil.which("ninja"),
        "C++ compiler": shutil.which(os.environ.get("CXX", "c++")),
        "Python.h": Path(sysconfig.get_paths()["include"], "Python.h").exists(),
    }
    if devices.is_gpu():
        compilers = {"cuda": ("nvcc", cpp_extension.CUDA_HOME), "rocm": ("hipcc", cpp_extension.ROCM_HOME)}
        name, home = compilers[devices.kind()]
        found[name] = home and Path(home, "bin", name).exists()
    return [name for name, there in found.items() if not there]


@contextlib.contextmanager
def compiling(name: str, folder: Path, timeout: float = COMPILE_SECONDS) -> Iterator[None]:
    """Compile operator ``name`` in ``folder`` in here: one process at a time, the others wait and are told.

    A lock that a killed process left there is removed. `TimeoutError` after ``timeout`` seconds of waiting
    names what is waited for.
    """
    deadline = time.monotonic() + timeout
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / OURS).open("w") as ours:
        if not _acquired(ours):
            say(f"waiting for another process that compiles DeepSpeed's {name} in {folder}")
        while not _acquired(ours):
            _pause(deadline, f"another process compiles DeepSpeed's {name} in {folder}", timeout)
        left = folder / LOCK
        while left.exists() and is_held(left):
            _pause(deadline, f"a process that lives holds {left}", timeout)
        if left.exists():
            left.unlink(missing_ok=True)
            say(f"removed {left}: a process that was killed while it compiled left it")
        say(f"compiling DeepSpeed's {name}, about a minute, in {folder}")
        yield


def left_locks(root: Path) -> list[Path]:
    """The locks of torch below ``root`` that nobody holds; for each a later compilation waits for ever."""
    return [lock for lock in sorted(root.glob(f"**/{LOCK}")) if not is_held(lock)]


def extensions_folder() -> Path:
    """Where torch compiles operators for this user."""
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(named) if named else Path.home() / ".cache" / "torch_extensions"


def say(line: str) -> None:
    """One line on stderr."""
    print(f"rlhf-stack: {line}", file=sys.stderr, flush=True)


def _acquired(file: IO[str]) -> bool:
    """Whether this process has the kernel's lock on a file now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _pause(deadline: float, reason: str, timeout: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"waited {timeout:.0f} s: {reason}")
    time.sleep(POLL_SECONDS)


def is_held(path: Path) -> bool:
    """Whether a process of this machine, as far as this one may look, has a file open: its owner lives."""
    wanted = path.stat()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            found = link.stat()
            if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                return True
    return False
