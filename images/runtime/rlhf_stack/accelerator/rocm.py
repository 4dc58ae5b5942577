"""AMD GPUs for Ray: detection, the GPUs that Ray may assign, and the restriction of a process to some.

Ray's patched accelerator managers call this. Ray sets ``CUDA_VISIBLE_DEVICES``, as vLLM 0.4.2 does for its
workers, and HIP's own variable to the same value. ``ROCR_VISIBLE_DEVICES`` is left to the user, because it
renumbers the GPUs for both.
"""

import contextlib
import functools
import json
import logging
import os
import platform
import re
import subprocess
from pathlib import Path

from rlhf_stack.accelerator import visible_devices
from rlhf_stack.config import env_vars
from rlhf_stack.lazy import ray

SMI_SECONDS = 30.0
TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")
MODULE = Path("/sys/module/amdgpu")
CARDS = Path("/sys/class/drm")
COMPUTES = re.compile(r"^simd_count [1-9]", re.MULTILINE)
CARD = re.compile(r"^card\d+,", re.MULTILINE)
GPU = re.compile(r"^\d+,[0-9a-fA-F]{4,}:", re.MULTILINE)  # its number and PCI address
PRODUCT_KEYS = ("GPU ID", "Device ID")  # of ROCm 5 and ROCm 6

logger = logging.getLogger(__name__)


@functools.cache
def is_rocm() -> bool:
    """Report whether the GPUs of this machine are AMD's: by the image, or because some are detected."""
    return env_vars.accelerator() == "rocm" or count() > 0


def count() -> int:
    """Count GPUs by ``rocm-smi`` or ``amd-smi``, or by the kernel where both are absent, fail or list none.

    ``amd-smi`` replaces ``rocm-smi``: a machine with ROCm 7 may have it alone.
    """
    listings = ((CARD, "rocm-smi", "-i", "--csv"), (GPU, "amd-smi", "list", "--csv"))
    return (
        next((found for line, *command in listings if (found := _listed(line, command))), 0) or kernel_count()
    )


def product() -> str | None:
    """Return the PCI device id of the first GPU, such as "0x74a1"; None if ``rocm-smi`` reports none."""
    return parse_product(_output(["rocm-smi", "--showid", "--json"]))


def visible_ids() -> list[str] | None:
    """Return the GPUs of this node that Ray may assign, None for all; empty if two variables disagree.

    A disagreement is a warning and not an error, because Ray calls this at import, even without GPU work.
    """
    try:
        return visible_devices.node_ids(os.environ)
    except visible_devices.VisibleDevicesError as error:
        logger.warning("no GPU of this node can be used: %s", error)
        return []


def restrict_process(ids: list[str]) -> None:
    """Restrict this process to the GPUs ``ids`` that Ray assigned, unless a NOSET variable forbids it.

    HIP's own variable is set as well: it takes precedence, and torch 2.4 counts by it alone.
    """
    if not visible_devices.noset_enabled(os.environ):
        os.environ |= visible_devices.environment_for(ids, "rocm")


def join_ray(address: str | None, gpus: int) -> None:
    """Connect vLLM to the running Ray cluster, or start one on this machine with ``gpus`` GPUs.

    A running cluster accepts no ``num_gpus``, and an older Ray detects no AMD GPU when it starts one.
    """
    if ray.is_initialized():
        return
    try:
        ray.init(address=address or "auto", ignore_reinit_error=True)
    except ConnectionError:
        if address:
            raise
        ray.init(ignore_reinit_error=True, num_gpus=gpus)


def _listed(line: re.Pattern[str], command: list[str]) -> int:
    """Count the different lines of a command's output that are a GPU, ignoring warnings around the table."""
    return len(set(line.findall(_output(command))))


def parse_product(listing: str) -> str | None:
    """Return the PCI device id of card 0 in the output of ``rocm-smi --showid --json``."""
    for line in listing.splitlines():
        try:
            card = json.loads(line)["card0"]
            return next(str(card[key]) for key in PRODUCT_KEYS if key in card)
        except (ValueError, LookupError, TypeError, StopIteration):
            continue  # a warning: they share the output
    return None


def kernel_count() -> int:
    """Count the compute nodes in the amdkfd driver's topology; those of other containers are unreadable."""
    found = 0
    for file in TOPOLOGY.glob("*/properties"):
        with contextlib.suppress(OSError):
            found += bool(COMPUTES.search(file.read_text(encoding="ascii", errors="replace")))
    return found


def driver() -> str:
    """Return the version of the amdgpu driver, "" if it is not loaded.

    Only AMD's own package of it has a version; that of Linux has the version of its kernel.
    """
    if not MODULE.is_dir():
        return ""
    with contextlib.suppress(OSError):
        return (MODULE / "version").read_text(encoding="utf-8").strip()
    return f"Linux {platform.release()}"


def product_names() -> tuple[str, ...]:
    """Return the names that the amdgpu driver reads from its cards; () if they have none."""
    found = []
    for file in sorted(CARDS.glob("card[0-9]*/device/product_name")):
        with contextlib.suppress(OSError):
            found.append(file.read_text(encoding="utf-8", errors="replace").strip())
    return tuple(filter(None, found))


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=SMI_SECONDS, check=False
        )
    except FileNotFoundError:
        return ""
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("%s does not answer, so it detects no AMD GPU: %s", command[0], error)
        return ""
    return done.stdout
