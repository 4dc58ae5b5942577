"""Collects what NCCL needs to use the RDMA adapters of this node, as NCCL itself looks it up."""

import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from rlhf_stack.diagnostics.doctor.facts import Rdma
from rlhf_stack.diagnostics.network_adapters import rdma_adapters

PROBE_SECONDS = 10.0
PEER_MEMORY = (Path("/sys/module/nvidia_peermem"), Path("/sys/module/nv_peer_mem"))
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
STATUS = Path("/proc/self/status")
CAPABILITIES = re.compile(r"^CapEff:\s*([0-9a-f]+)$", re.MULTILINE)
IPC_LOCK = 14  # the capability that lifts the limit of locked memory
UNLIMITED = -1
# Separate processes: the libraries load drivers, which may print or crash.
VERBS = """
import ctypes
library, count = ctypes.CDLL("libibverbs.so.1"), ctypes.c_int()
library.ibv_get_device_list.restype = ctypes.c_void_p
library.ibv_get_device_list(ctypes.byref(count))
print(count.value)
"""
PLUGIN = """
import ctypes, sys
for name in sys.argv[1:]:
    try:
        ctypes.CDLL(name)
    except OSError:
        continue
    print(name)
    break
"""


def collect_rdma(variables: Mapping[str, str] = os.environ) -> Rdma:
    """Collect the facts about RDMA; on a node without RDMA adapters nothing is loaded."""
    adapters = rdma_adapters()
    if not adapters:
        return Rdma()
    verbs, error = verbs_count()
    return Rdma(
        adapters,
        verbs,
        error,
        net_plugin(variables) if any(each.is_efa for each in adapters) else "",
        memlock(),
        any(path.exists() for path in PEER_MEMORY),
        is_open_driver(),
        platform.release(),
    )


def verbs_count() -> tuple[int | None, str]:
    """The number of adapters that libibverbs lists, None if it cannot be loaded, and its last error."""
    output, error = _run(VERBS)
    return (int(output) if output.isdecimal() else None), error


def net_plugin(variables: Mapping[str, str]) -> str:
    """The network plugin that NCCL loads with ``variables``, by the names that it tries; "" if none loads."""
    chosen = variables.get("NCCL_NET_PLUGIN", "")
    names = (chosen, f"libnccl-net-{chosen}.so") if chosen else ("libnccl-net.so",)
    return _run(PLUGIN, *names)[0]


def memlock() -> int:
    """The limit of locked memory of this process in bytes; -1 if unlimited, also by CAP_IPC_LOCK."""
    found = CAPABILITIES.search(STATUS.read_text(encoding="utf-8")) if STATUS.is_file() else None
    if found and int(found[1], 16) >> IPC_LOCK & 1:
        return UNLIMITED
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return UNLIMITED if limit == resource.RLIM_INFINITY else limit


def is_open_driver() -> bool:
    """Whether NVIDIA's kernel modules are the open ones, which DMA-BUF requires."""
    return NVIDIA_DRIVER.is_file() and "Open Kernel Module" in NVIDIA_DRIVER.read_text(encoding="utf-8")


def _run(code: str, *arguments: str) -> tuple[str, str]:
    """The standard output of a Python program, and the last line of its standard error."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    lines = done.stderr.strip().splitlines()
    return done.stdout.strip(), lines[-1] if lines else ""
