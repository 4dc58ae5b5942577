"""AMD GPUs for Ray: how many there are, which ones it may hand out, and how a process is restricted to some.

Ray's patched accelerator managers call this. What Ray sets is ``CUDA_VISIBLE_DEVICES``, which vLLM 0.4.2 sets
for its workers too, and HIP's own variable alike; ``ROCR_VISIBLE_DEVICES`` is left to the user, because it
renumbers the GPUs under everything else.
"""

import contextlib
import functools
import json
import logging
import os
import re
import subprocess
from pathlib import Path

from rlhf_stack.accelerator import visible_devices
from rlhf_stack.config import env_vars

SMI_SECONDS = 30.0
TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")
COMPUTES = re.compile(r"^simd_count [1-9]", re.MULTILINE)
CARD = re.compile(r"^card\d+,", re.MULTILINE)
PRODUCT_KEYS = ("GPU ID", "Device ID")  # of ROCm 5 and of ROCm 6

logger = logging.getLogger(__name__)


@functools.cache
def is_here() -> bool:
    """Whether Ray's GPUs are AMD's: as the image says, or because ``rocm-smi`` lists some."""
    return env_vars.accelerator() == "rocm" or count() > 0


def count() -> int:
    """The GPUs that ``rocm-smi`` lists, or the kernel where that is absent, fails, hangs or prints none."""
    return cards(_smi("-i", "--csv")) or kernel_count()


def product() -> str | None:
    """The PCI device id of the first GPU, such as "0x74a1", or None where ``rocm-smi`` tells none."""
    return first_product(_smi("--showid", "--json"))


def visible_ids() -> list[str] | None:
    """The GPUs of this node that Ray may hand out, or None for all; none where two variables disagree.

    That is a warning and not an error, because Ray asks when it is imported, also for work without GPUs.
    """
    try:
        return visible_devices.node_ids(os.environ)
    except visible_devices.Disagreement as error:
        logger.warning("no GPU of this node can be used: %s", error)
        return []


def show(ids: list[str]) -> None:
    """Restrict this process to the GPUs ``ids`` that Ray assigned to it, unless the user said not to.

    HIP's own variable says the same: it wins where it is set, and torch 2.4 counts by it alone.
    """
    if not visible_devices.left_alone(os.environ):
        os.environ |= visible_devices.restricted(ids, "rocm")


def join_ray(address: str | None, gpus: int) -> None:
    """Connect vLLM to the running Ray cluster, or start one of this machine with ``gpus`` GPUs.

    A running cluster takes no ``num_gpus``, and a new one of an older Ray finds no AMD GPU by itself.
    """
    import ray

    if ray.is_initialized():
        return
    try:
        ray.init(address=address or "auto", ignore_reinit_error=True)
    except ConnectionError:
        if address:
            raise
        ray.init(ignore_reinit_error=True, num_gpus=gpus)


def cards(listing: str) -> int:
    """The GPUs in the table of ``rocm-smi -i --csv``, whatever warnings stand around it."""
    return len(set(CARD.findall(listing)))


def first_product(listing: str) -> str | None:
    """The PCI device id of card 0 in what ``rocm-smi --showid --json`` printed."""
    for line in listing.splitlines():
        try:
            card = json.loads(line)["card0"]
            return next(str(card[key]) for key in PRODUCT_KEYS if key in card)
        except (ValueError, LookupError, TypeError, StopIteration):
            continue  # a warning: they come on the same output
    return None


def kernel_count() -> int:
    """The nodes of the amdkfd driver's topology that compute; one of a GPU that is not ours is unreadable."""
    found = 0
    for file in TOPOLOGY.glob("*/properties"):
        with contextlib.suppress(OSError):
            found += bool(COMPUTES.search(file.read_text(encoding="ascii", errors="replace")))
    return found


def _smi(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["rocm-smi", *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SMI_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        return ""
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("rocm-smi does not answer, so no AMD GPU is detected: %s", error)
        return ""
    return done.stdout
